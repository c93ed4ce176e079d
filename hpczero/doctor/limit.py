"""TimeLimit: a probe that does not return ends the job with a message, because a doctor that hangs helps nobody.

Owns: the timer and the way out. Must not know: what is being probed.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from types import TracebackType

from hpczero.errors import EXIT_HANG, abort_job, launcher_rank

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
