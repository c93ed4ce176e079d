"""What became of each test, one JSON object a line, so that a run that is aborted half-way still counts.

``tests/helpers/plugin.py`` writes these files on rank 0, ``tests/run.py`` reads them. Must not know: pytest, MPI.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["started", "passed", "failed", "skipped", "elsewhere", "spared"]
"""``elsewhere``: runs only at other numbers of ranks; ``spared``: runs if all cases are asked for.
A test with nothing after ``started`` took the job down."""


@dataclass(frozen=True)
class Record:
    """One line: a test began, or ended in some way.

    Attributes:
        seconds: that it took, set-up of what it shares with later tests included.
        jobs: commands that it started and waited for.
        job_seconds: that it waited for them.
        cpu_seconds: of this process, of those that it has waited for, and of the fork server's jobs.
    """

    test: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    jobs: int = 0
    job_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def append_to(self, path: Path) -> None:
        """Add this line to ``path``; it is on disk when the call returns."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All records of ``path`` in the order written; none if the file is not there."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
