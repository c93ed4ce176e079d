"""What follows when an exception leaves a collective call that the other ranks are still in.

Owns: that no call follows on this rank, and the memory that MPI may still read and write. Must not know: what the call
does, MPI.

[Note: Why nothing goes on]
A signal handler of the program's own may raise anywhere, so also between two messages of one call. MPI has been told of
some messages and goes on with them whenever this process calls it again; the others were never sent. A later call on
the same communicator would be matched with them, and ranks would take one unit's values for another's. Memory that was
given back would be written to, and the process would die in some other place, with a corrupted heap. So every later
call of this rank is an error, and memory that was under way stays for as long as the process lives.
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from hpczero.errors import EXIT_FAILURE, CommError, abort_job

# Of all cut-off calls of this process; see [Note: Why nothing goes on].
_UNDER_WAY: list[object] = []


def keep_for_good(*held: object) -> None:
    """Keep what MPI may still read and write until the process ends. Not collective."""
    _UNDER_WAY.extend(held)


class CutOff:
    """Whether a call of these ranks was cut off on this one.

    Attributes:
        rank: of the job, for messages.
        ranks: that make these calls together. Where it is one, nobody waits for the rest of a call, and any call may
            follow.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        """Not collective."""
        self.rank, self.ranks = rank, ranks
        self._what: str | None = None
        self._why = ""
        self._holds = False
        self._apart: set[int] = set()

    def happened(self) -> bool:
        """Whether a call was cut off, so that nothing may be given back."""
        return self._holds

    @contextmanager
    def apart(self) -> Iterator[None]:
        """This thread's calls go over communicators of their own: what is cut off elsewhere is nothing to them."""
        thread = threading.get_ident()
        self._apart.add(thread)
        try:
            yield
        finally:
            self._apart.discard(thread)

    def note(self, what: str, error: BaseException) -> None:
        """``error`` leaves the call ``what``. An error that all ranks raise together cuts off nothing."""
        self.hold(error)
        if self._holds and self._what is None:
            self._what, self._why = what, f"{type(error).__name__} ({error})"
            if isinstance(error, SystemExit):
                _end_job_at_exit(self.rank, what, error)

    def hold(self, error: BaseException) -> None:
        """Keep all that the functions hold which ``error`` has left: requests, buffers, the transport.

        Calls go on: who waits for what the communication thread has failed in hears of that each time.
        """
        if self.ranks == 1 or getattr(error, "agreed", False):
            return
        if getattr(error, "raised_by", 0) >= self.ranks:  # also of a part of the job
            return
        self._holds = True
        seen: BaseException | None = error
        while seen is not None:
            _keep_locals(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__

    @contextmanager
    def holding(self) -> Iterator[None]:
        """MPI is told of memory: an exception that leaves the block keeps it for good, and calls go on."""
        try:
            yield
        except BaseException as error:
            self.hold(error)
            raise

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Messages with computation between them: an exception that leaves the block cuts ``what`` off.

        Raises:
            CommError: on entry; something was cut off before.
        """
        self.check(what)
        try:
            yield
        except BaseException as error:
            self.note(what, error)
            raise

    def check(self, what: str) -> None:
        """Refuse the call ``what`` if one was cut off.

        Raises:
            CommError: it was, on this rank.
        """
        if self._what is not None and threading.get_ident() not in self._apart:
            raise CommError(
                f"rank {self.rank}: {what} cannot begin, because {self._why} cut off {self._what} on this rank; others "
                "may wait for the rest of that; end the program and go on from a checkpoint"
            )


def _end_job_at_exit(rank: int, what: str, error: SystemExit) -> None:
    """A rank that exits is told of to nobody by itself, and the others wait for the rest of ``what``."""
    code = error.code if isinstance(error.code, int) and error.code else EXIT_FAILURE

    def end() -> None:
        sys.stderr.write(
            f"[rank {rank}] sys.exit({error.code!r}) cut off {what}, for the rest of which others wait: the job ends\n"
        )
        abort_job(code)

    atexit.register(end)  # the last one is called first: what is freed at exit may wait for others


def _keep_locals(trace: TracebackType | None) -> None:
    # A copy: ``traceback.clear_frames`` would empty the frames themselves.
    keep_for_good(*(dict(frame.f_locals) for frame, _ in traceback.walk_tb(trace)))
