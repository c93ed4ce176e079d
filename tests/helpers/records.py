"""What became of each test, one JSON object a line, so that a run that is aborted half-way still counts.

``tests/helpers/plugin.py`` writes these files on rank 0, ``tests/run.py`` reads them. Must not know: pytest, MPI.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

EXIT_HANG, EXIT_QUIET = 86, 124

Outcome = Literal["started", "passed", "failed", "skipped", "elsewhere", "spared"]
"""``elsewhere``: runs only at other numbers of ranks; ``spared``: runs if all cases are asked for.
A test with nothing after ``started`` took the job down."""


@dataclass(frozen=True)
class Record:
    """One line: a test began, or ended in some way.

    Attributes:
        seconds: that it took, set-up of what it shares with later tests included.
        jobs: commands that it started and waited for.
        anew: Python jobs among them, and those that they started, that the fork server could not fork.
        job_seconds: that it waited for them.
        cpu_seconds: of this process, of those that it has waited for, and of the fork server's jobs; ``read_records``
            adds those of the other ranks.
    """

    test: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    jobs: int = 0
    anew: int = 0
    job_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def append_to(self, path: Path) -> None:
        """Add this line to ``path``; it is on disk when the call returns."""
        line = (json.dumps(asdict(self)) + "\n").encode()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line)  # whole, whoever else writes
        os.close(file)


def took_down(exit_code: int) -> str:
    """What is said of a test that ended the process, or the job, that ran it."""
    if exit_code < 0:
        why = f"signal {signal.Signals(-exit_code).name}"
    else:
        why = {EXIT_HANG: "it hung", EXIT_QUIET: "no test began or ended for long"}.get(
            exit_code, "it crashed"
        )
    return f"took the job down, exit code {exit_code} ({why})"


def of_rank(path: Path, rank: int) -> Path:
    """The file of that rank's records; those of ranks above 0 say what a test has cost there, and nothing else."""
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


def read_records(path: Path) -> list[Record]:
    """All records of ``path`` in the order written, with the costs of all ranks; none if the file is not there."""
    if not path.exists():
        return []
    elsewhere: dict[str, float] = {}
    for other in path.parent.glob(f"{path.name}.*"):
        for record in _read(other):
            elsewhere[record.test] = elsewhere.get(record.test, 0.0) + record.cpu_seconds
    ended = ("passed", "failed", "skipped")
    return [
        replace(record, cpu_seconds=record.cpu_seconds + elsewhere.pop(record.test, 0.0))
        if record.outcome in ended
        else record
        for record in _read(path)
    ]


def _read(path: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
