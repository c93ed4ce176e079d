"""Finding: what one check saw, and what to do about it.

Owns: the verdict type, its text form, the verdict over all findings. Must not know: MPI, torch, how facts are found.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from hpczero.errors import EXIT_MISCONFIGURED


class Status(enum.Enum):
    """How much a finding matters: ``WARN`` costs speed or a feature, ``FAIL`` means that training cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        title: what was looked at, a few words.
        value: what was seen, with units.
        status: how much it matters.
        remedy: what to type or change; empty exactly when the status is ``OK``.
    """

    title: str
    value: str
    status: Status = Status.OK
    remedy: str = ""

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.status is not Status.OK):
            raise ValueError(
                f"finding {self.title!r}: a problem needs a remedy, and only a problem does; "
                f"got status {self.status.value!r} with remedy {self.remedy!r}"
            )

    def text(self) -> str:
        """One line, and a second one with the remedy where there is a problem."""
        line = f"{self.status.value:<4}  {self.title:<18}  {self.value}"
        return f"{line}\n{'':<6}{'':<18}  -> {self.remedy}" if self.remedy else line

    def as_json(self) -> dict[str, str]:
        """The finding for machines; keys are the attribute names."""
        return {
            "title": self.title,
            "value": self.value,
            "status": self.status.value,
            "remedy": self.remedy,
        }


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if training can work here, 78 (wrong configuration: do not requeue) if anything failed."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    return EXIT_MISCONFIGURED if failed else 0


def summary(findings: Iterable[Finding]) -> str:
    """The verdict in one line."""
    statuses = [finding.status for finding in findings]
    fails, warns = statuses.count(Status.FAIL), statuses.count(Status.WARN)
    verdict = f"not usable: {fails} blocking" if fails else "usable"
    return f"{verdict}, {warns} warning{'' if warns == 1 else 's'}, {len(statuses)} checks"
