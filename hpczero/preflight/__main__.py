"""The preflight command: ``srun --ntasks-per-node=1 python -m hpczero.preflight``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.doctor.finding import TimeLimit
from hpczero.errors import EXIT_FAILURE, ConfigError, run
from hpczero.files.regular import WHY, Explained
from hpczero.options.reading import parse_command_line
from hpczero.options.values import digits
from hpczero.preflight.verdict import Fault, NodeReport, faults
from hpczero.run.starting.precheck import tell_start_aside

MOST_SHOWN = 64
MIB = 2**20


@dataclass(frozen=True)
class PreflightOptions:
    """What to try.

    Attributes:
        directory: folder on the file system that the run will use; every node must see it.
        gpus: GPUs that every node must have; None: SLURM_GPUS_ON_NODE, else as many as the best node has.
        file_mib: MiB that each node writes and reads.
        pair_mib: MiB of each message between two nodes.
        rounds: each node meets one other in each, so with fewer than the nodes some pairs are left out.
        time_limit: seconds for all of it; then the job is ended with exit code 86.
        json: file for the reports.
    """

    directory: Path = Path(".")
    gpus: int | None = None
    file_mib: int = 64
    pair_mib: int = 64
    rounds: int = 32
    time_limit: float = 600.0
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("file_mib", "pair_mib", "rounds", "time_limit"):
            value = getattr(self, name)
            if not 1 <= value < 1e6:
                raise ConfigError(f"--{name}: got {value:g}, expected at least 1")
        if self.gpus is not None and self.gpus < 0:
            raise ConfigError(f"--gpus: got {self.gpus}, expected 0 or above")


def main() -> int:
    """Print a line per node, then the bad ones as an option of sbatch. Returns 1 if there are any. Collective."""
    options = parse_command_line(
        PreflightOptions,
        sys.argv[1:],
        prog="python -m hpczero.preflight",
        description="Find the nodes of a job that would hold a run up: GPUs that are missing, files that come back "
        "wrong, slow links. Run it with one rank per node. The last line names the bad ones: --exclude=a,b. "
        "Exit code 0: all good, 1: some are bad, 86: it hung.",
    )
    tell_start_aside("hpczero.preflight")
    # The imports too: they start MPI, where all wait for a node that does not answer.
    with TimeLimit("the trial of all nodes", options.time_limit):
        # Here and not at the top: --help and bad options must not start MPI.
        from hpczero.job.topology import Topology
        from hpczero.preflight.probes import examine

        topology = Topology.of_world()
        reports = examine(
            topology,
            os.environ,
            folder=options.directory,
            file_nbytes=options.file_mib * MIB,
            pair_nbytes=options.pair_mib * MIB,
            most_rounds=options.rounds,
        )
        # Of rank 0 for all: SLURM may say it to some ranks only.
        asked = topology.broadcast_text(os.environ.get("SLURM_GPUS_ON_NODE", ""))
    wanted = options.gpus
    if wanted is None:
        wanted = digits(asked)
    found = faults(reports, gpus=wanted)
    with topology.agreed("write the reports"):
        if topology.is_root:
            sys.stdout.write(text(reports, found))
            sys.stdout.flush()
            if options.json is not None:
                write(options.json, reports, found)
    topology.free()
    return EXIT_FAILURE if found else 0


def text(reports: Sequence[NodeReport], found: Sequence[Fault]) -> str:
    """A line per node, the bad ones first if not all are shown; then what is wrong; then the option."""
    bad = list(dict.fromkeys(fault.node for fault in found))
    shown = sorted(reports, key=lambda report: report.name not in bad)[:MOST_SHOWN]
    lines = [
        f"{'node':<16} ranks GPUs {'write':>9} {'read':>9} {'slowest pair':>13} {'fastest':>9}  MB/s"
    ]
    for report in shown:
        pairs = report.pairs.values()
        rates = (
            report.write_mbyte_s,
            report.read_mbyte_s,
            min(pairs, default=None),
            report.best_pair,
        )
        widths = (9, 9, 13, 9)
        cells = " ".join(
            f"{'-' if rate is None else format(rate, ',.0f'):>{width}}"
            for rate, width in zip(rates, widths, strict=True)
        )
        lines.append(f"{report.name:<16} {report.ranks:>5} {report.gpus:>4} {cells}")
    if len(reports) > len(shown):
        lines.append(f"... {len(reports) - len(shown)} more nodes")
    lines += [f"bad: {fault.node}: {fault.what}" for fault in found]
    if bad:
        lines.append(f"--exclude={','.join(bad)}")
    else:
        lines.append(f"all {len(reports)} node(s) are good")
    return "\n".join([*lines, ""])


def write(path: Path, reports: Sequence[NodeReport], found: Sequence[Fault]) -> None:
    """Reports and faults as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = {
        "nodes": [dataclasses.asdict(report) for report in reports],
        "faults": [dataclasses.asdict(fault) for fault in found],
        "exclude": list(dict.fromkeys(fault.node for fault in found)),
    }
    with Explained(ConfigError, f"--json: {path} cannot be written: {WHY}"):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
