"""Ends a test that hangs: stacks of all ranks, then the whole job, with exit code 86.

pytest catches what a test raises, so a rank that failed before a collective leaves the others waiting for ever and no
abort fires. The rank whose limit passes first asks all ranks for their Python stacks (a signal that the interpreter
answers even inside an MPI call), prints them and aborts. All ranks run on one machine, and a limit stretches with its
pace (``pace.py``).

Must not know: pytest.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.pace import SLOWEST, Limit, pace
from tests.helpers.processes import end_family

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_HANG = 86
STAGGER_S = 3.0  # rank r fires r * STAGGER_S late: rank 0 speaks for all unless it cannot
SETTLE_S = (
    1.0  # for the other ranks to write their stacks, and for the launcher to pass our words on
)
LAST_RESORT_S = (
    20.0  # past the limit: C code that holds the interpreter's lock keeps our thread from running
)
BORING = (
    "/_pytest/",
    "/pluggy/",
    "/pytest/__main__",
    "<frozen runpy>",
)  # frames that are the same in every test
STACKS = signal.SIGRTMIN + 1  # not one that the code under test may want for itself


class Watchdog:
    """The limit on what this rank does now."""

    def __init__(self, comm: MPI.Intracomm | None, stderr: int) -> None:
        """Collective over ``comm``.

        Args:
            comm: all ranks of the job, for us alone; None in a process without MPI.
            stderr: file descriptor of the real stderr, which no capturing swallows.
        """
        self._comm = comm
        self._rank = comm.rank if comm else 0
        self._size = comm.size if comm else 1
        self._stderr = stderr
        # Nameless files: nothing is left behind however a rank ends. The others read them through /proc.
        self._stacks = tempfile.TemporaryFile("w")  # noqa: SIM115  (open to the end)
        faulthandler.register(STACKS, file=self._stacks, all_threads=True)
        mine = (os.getpid(), self._stacks.fileno())
        self._ranks = comm.allgather(mine) if comm else [mine]
        self._timer: threading.Timer | None = None
        self._expired = threading.Event()
        self._lock = threading.Lock()  # of the timer, which its own thread may set anew
        self._name = ""
        self._limit_s = 0.0
        self._limit = Limit(0.0)

    def start(self, name: str, limit_s: float) -> None:
        """Watch ``name`` from now on, for ``limit_s`` seconds."""
        self._name, self._limit_s = name, limit_s
        self._limit = Limit(limit_s)
        self._stacks.seek(0)
        self._stacks.truncate()
        self._arm(limit_s + self._rank * STAGGER_S)

    def hurry(self, grace_s: float, note: str) -> None:
        """This rank failed and waits for the others: give them ``grace_s``; ``note`` is told if they do not come."""
        self._stacks.write(note.rstrip() + "\n")
        self._stacks.flush()
        self._limit = Limit(min(grace_s, self._limit_s + self._rank * STAGGER_S))
        self._arm(self._limit.seconds)

    def stop(self) -> None:
        """What was watched is over. Does not return once the limit has passed: the verdict is spoken."""
        with self._lock:
            if self._timer is not None and not self._expired.is_set():
                self._timer.cancel()
                self._timer = None
        if self._expired.is_set():
            threading.Event().wait()
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """End of the session."""
        self.stop()
        faulthandler.unregister(STACKS)
        self._stacks.close()

    def _arm(self, seconds: float) -> None:
        self.stop()
        self._wait(seconds, self._limit)

    def _wait(self, seconds: float, limit: Limit) -> None:
        self._timer = threading.Timer(seconds, self._expire, [limit])
        self._timer.daemon = True
        self._timer.start()
        last_s = seconds * SLOWEST + LAST_RESORT_S
        faulthandler.dump_traceback_later(last_s, exit=True, file=self._stderr)

    def _expire(self, limit: Limit) -> None:
        more_s = limit.more_s(pace())
        with self._lock:
            if limit is not self._limit or self._timer is None:
                return  # what was watched has ended meanwhile
            if more_s:
                self._wait(more_s, limit)
                return
            self._expired.set()
        for pid, _ in self._ranks:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, STACKS)
        time.sleep(SETTLE_S)
        ranks = "" if self._comm is None else f"rank {self._rank} of {self._size}: "
        said = f"limit {self._limit_s:g} s; ending the job with exit code {EXIT_HANG}"
        lines = ["", f"watchdog: {ranks}{self._name} hangs, {said}"]
        for rank, (pid, file) in enumerate(self._ranks):
            try:
                stacks = Path(f"/proc/{pid}/fd/{file}").read_text().splitlines()
            except OSError as error:  # it is gone: no reason to let the rest of the job hang
                stacks = [f"gave no stacks: {error}"]
            kept = [line for line in stacks if not any(part in line for part in BORING)]
            lines += [f"[rank {rank}] {line}" for line in kept]
        os.write(self._stderr, ("\n".join(lines) + "\n").encode())
        time.sleep(SETTLE_S)
        end_family(os.getpid(), spare_first=True)  # jobs that the test started
        if self._comm is not None and self._size > 1:
            self._comm.Abort(EXIT_HANG)
        os._exit(EXIT_HANG)
