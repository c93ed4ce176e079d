"""The processes that a test, or a phase of tests, started, and how they end.

Owns: which processes belong to one we started (Linux /proc), and ending exactly those. Must not know: pytest, MPI.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from scaling.evidence.host import process_seconds

GRACE_S = 3.0
LOOK_S = 0.5


@dataclass(frozen=True)
class Process:
    """One live process; the start time tells it from a later process with the same id."""

    pid: int
    parent: int
    session: int
    started: str

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """The process ``pid``, or None if it is gone or only waits to be reaped."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
        if fields[0] == "Z":
            return None
        return cls(pid, parent=int(fields[1]), session=int(fields[3]), started=fields[19])

    def alive(self) -> bool:
        """Whether this very process still runs, be it under another parent by now."""
        now = Process.read(self.pid)
        return now is not None and now.started == self.started


def family(pid: int) -> list[Process]:
    """Descendants of ``pid`` and the rest of a session it leads, ``pid`` itself left out; parents first."""
    processes = [Process.read(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    found = {pid}
    members: list[Process] = []
    grew = True
    while grew:
        fresh = [
            process
            for process in processes
            if process is not None
            and process.pid not in found
            and (process.parent in found or process.session == pid)
        ]
        members += fresh
        found |= {process.pid for process in fresh}
        grew = bool(fresh)
    return members


def come_to_rest(pids: Collection[int], *, share: float, limit_s: float = 30.0) -> bool:
    """Whether they come to take less than ``share`` of a core, all together, within the limit.

    What they do before they rest takes longer on a busy machine; one that never rests takes more on any.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = process_seconds(pids)
        time.sleep(LOOK_S)
        if process_seconds(pids) - before < share * LOOK_S:
            return True
    return False


def end_family(pid: int, *, spare_first: bool = False, grace_s: float = GRACE_S) -> None:
    """End ``pid`` and every process of ``family(pid)``: politely, so that a launcher cleans up, then for certain.

    Args:
        pid: a process we started, or ourselves.
        spare_first: leave ``pid`` itself alive.
        grace_s: seconds between asking and killing.
    """
    first = None if spare_first else Process.read(pid)
    members = [*([first] if first else []), *family(pid)]
    _signal_all(members, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(member.alive() for member in members):
        time.sleep(0.05)
    _signal_all(members, signal.SIGKILL)


def _signal_all(members: list[Process], number: signal.Signals) -> None:
    for member in members:
        if member.alive():
            try:
                os.kill(member.pid, number)
            except ProcessLookupError:
                continue


def launch_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what its own launcher put there, so that a new MPI job can start from it.

    Args:
        changes: variables to set on top.
    """
    ours = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, **changes}


def write_tool(path: Path, text: str) -> Path:
    """Make ``path`` a program, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
