"""Everything there is to check and measure on a GPU, in one command: ``python -m scaling.gpu``.

``--plan first`` says whether it works, ``--plan second`` how fast it is. ``--pages FOLDER`` writes the results in a
folder into two pages of docs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from hpczero.errors import ConfigError, run
from scaling.evidence.harness import options_of
from scaling.evidence.record import ROOT, Recorder, Row, circumstances, machine_name, slug
from scaling.gpu.goals import report, write_pages
from scaling.gpu.jobs import TWIN_SLOWNESS, chosen, known_checks, nvidia_smi, results, seconds_of


@dataclass(frozen=True)
class Options:
    """What to run. HPCZERO_LAUNCH="srun -n" replaces mpirun.

    Attributes:
        plan: first: does it work; second: how fast, how large; all: both.
        checks: as in "kernels parity"; left out, all of the plan.
        twin: the same checks on the host with small sizes, to test them where there is no device.
        limit_s: seconds for all of them together; left out, as long as the plan says.
        openmpi: folder of an Open MPI that takes device memory (install/cuda_aware_openmpi.sh), to be measured too.
        results: folder of all machines' results; left out, scaling/results.
        pages: measure nothing; write the results in this folder into docs/gpu-status.md and docs/performance.md.
    """

    plan: Literal["first", "second", "all"] = "all"
    checks: tuple[str, ...] = ()
    twin: tyro.conf.UseCounterAction[int] = 0  # a bare --twin
    limit_s: float | None = None
    openmpi: str | None = None
    results: str | None = None
    pages: str | None = None

    def __post_init__(self) -> None:
        known = known_checks()
        kinds = [*known, *(name.partition(":")[0] for name in known)]
        unknown = [name for name in self.checks if name not in kinds]
        if unknown:
            raise ConfigError(f"--checks: got {unknown[0]!r}, expected some of {' '.join(known)}")
        if not chosen(self.plan, self.checks, openmpi=self.openmpi is not None):
            raise ConfigError(
                f"--checks: none of {' '.join(self.checks)} is in the plan {self.plan!r}"
            )
        if self.limit_s is not None and self.limit_s <= 0:
            raise ConfigError(f"--limit_s: got {self.limit_s}, expected seconds above 0")
        if self.openmpi is not None and not (Path(self.openmpi) / "bin" / "mpirun").is_file():
            raise ConfigError(f"--openmpi: {self.openmpi} has no bin/mpirun")


def main() -> int:
    """Run the jobs one after the other; write rows, print the table. Returns 1 if a check could not be run."""
    options = options_of(Options, "gpu")
    if options.pages is not None:
        for path in write_pages(Path(options.pages)):
            sys.stderr.write(f"written: {path}\n")
        return 0
    jobs = chosen(options.plan, options.checks, openmpi=options.openmpi is not None)
    twin = bool(options.twin)
    limit_s = options.limit_s or seconds_of(jobs) * (TWIN_SLOWNESS if twin else 1)
    name = f"gpu-{'twin-' if twin else ''}{options.plan}"
    path = ROOT / (options.results or "scaling/results") / _machine(twin) / f"{name}.jsonl"
    openmpi = Path(options.openmpi).resolve() if options.openmpi else None
    with Recorder(path) as recorder:
        recorder.write("run", {**circumstances(), "twin": twin, "plan": options.plan})
        for kind, row in results(jobs, limit_s, twin=twin, openmpi=openmpi):
            recorder.write(kind, row)
            _tell(kind, row)
    sys.stdout.write(report(recorder.rows) + "\n")
    sys.stderr.write(f"rows in {path}\n")
    return int(any(row["kind"] == "failure" for row in recorder.rows))


def _tell(kind: str, row: Row) -> None:
    if kind == "took":
        took = "not begun" if row["s"] is None else f"{row['s']:.0f} s"
        sys.stderr.write(f"gpu: {row['check']} on {row['ranks'] or 'no'} rank(s): {took}\n")
    elif kind == "failure":
        sys.stderr.write(f"gpu: {row['check']} FAILED: {row['said'].partition(chr(10))[0]}\n")


def _machine(twin: bool) -> str:
    if twin:
        return machine_name()
    answers, names = nvidia_smi("name")
    return slug(names.splitlines()[0]) if answers and names else machine_name()


if __name__ == "__main__":
    run(main)
