"""The folder of a study: what was asked for, which points are done, which wait in a queue.

Owns: the files and what they mean. Must not know: how points are measured or started. ``points/KEY.json`` is the row of
a point that is done, ``points/KEY.job`` the number of the SLURM job that was to measure it, ``logs`` what jobs said,
``sweep-KIND.plan`` what was asked for last, ``sweep-KIND.collector`` the job that collects, ``sweep-KIND.jsonl`` the
rows together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpczero.errors import ConfigError
from scaling.evidence.record import Row, parse_rows
from scaling.sweep.setting import Setting, agrees
from scaling.sweep.study import Point

NEEDS = ("point", "samples_ms", "commit")  # of a row that can be collected


class StudyFolder:
    """The files of one study."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.plan = path / f"sweep-{kind}.plan"
        self.rows = path / f"sweep-{kind}.jsonl"
        self.collector = path / f"sweep-{kind}.collector"

    def point(self, key: str) -> Path:
        """Where the row of a point is."""
        return self.path / "points" / f"{key}.json"

    def job(self, key: str) -> Path:
        """Where the number of a point's job is."""
        return self.point(key).with_suffix(".job")

    def write_plan(self, head: Row, points: Sequence[Point]) -> None:
        """Remember what was asked for, for whoever collects."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**head, "points": [point.as_json() for point in points]})
        self.plan.write_text(text + "\n", encoding="utf-8")

    def read_plan(self) -> Row:
        """What was asked for last.

        Raises:
            ConfigError: nothing was, or the file is damaged.
        """
        try:
            head: Row = json.loads(self.plan.read_text(encoding="utf-8"))
            return head
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.plan}: cannot be read ({error}); run the sweep without --collect first"
            ) from error

    def finished(
        self, point: Point, now: str, setting: Setting, *, any_commit: bool
    ) -> tuple[Row | None, int]:
        """The newest row of ``point`` if it is done, and the number of lines that could not be read.

        A row of another setting never counts; one of another commit only with ``any_commit``.
        """
        malformed = 0
        found: list[Row] = []
        paths = {self.point(point.key(now, setting)): None}
        if any_commit:
            paths |= dict.fromkeys(sorted((self.path / "points").glob("*.json")))
        for path in paths:
            if not path.is_file():
                continue
            rows, bad = parse_rows(path, needs=NEEDS)
            malformed += bad
            found += [
                row
                for row in rows
                if row["point"] == point.as_json()
                and (any_commit or row["commit"] == now)
                and agrees(row, setting)
            ]
        # Dates are ISO 8601 in UTC, so text is in their order; of equal ones the first, which is that of ``now``.
        return max(found, key=lambda row: str(row.get("date", "")), default=None), malformed

    def forget(self, keys: Sequence[str]) -> None:
        """Remove the rows of points that are measured anew: what is found later is what is measured now."""
        for key in keys:
            self.point(key).unlink(missing_ok=True)

    def jobs(self, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(key, number) of the jobs that were submitted for these points, whatever became of them."""
        for key in keys:
            number = read_job(self.job(key))
            if number:
                yield key, number


def read_job(path: Path) -> str:
    """The number in a file that ``write_job`` has written; empty where there is none."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def write_job(path: Path, number: str) -> None:
    """Remember that job ``number`` was submitted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{number}\n", encoding="utf-8")
