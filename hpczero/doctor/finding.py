"""Finding: what one check saw, and what to do about it."""

from __future__ import annotations

import enum
import faulthandler
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from hpczero.errors import EXIT_HANG, EXIT_MISCONFIGURED, abort_job, launcher_rank


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
        return {**vars(self), "status": self.status.value}


def warning(title: str, value: str, remedy: str) -> Finding:
    """What costs speed or a feature."""
    return Finding(title, value, Status.WARN, remedy)


def failure(title: str, value: str, remedy: str) -> Finding:
    """What training cannot work with."""
    return Finding(title, value, Status.FAIL, remedy)


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


GRACE_S = 10.0


class TimeLimit:
    """Context in which one probe runs; when it takes longer than ``seconds``, every rank of the job ends with code 86.

    Two alarms: a Python thread, which says what hung and aborts the MPI job, and ``GRACE_S`` later the C-level timer of
    faulthandler, which also works while a library call holds the interpreter lock (HDF5 does).
    """

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()
        faulthandler.dump_traceback_later(self.seconds + GRACE_S, exit=True)

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._timer.cancel()

    def _expire(self) -> None:
        sys.stderr.write(
            f"[rank {launcher_rank()}] doctor: {self.what} did not end within {self.seconds:g} s; a rank does not take "
            "part, or the network or file system behind it stalls. If the machine is only slow, raise --time-limit\n"
        )
        sys.stderr.flush()
        abort_job(EXIT_HANG)
        os._exit(EXIT_HANG)  # one rank, or an Abort that returned
