"""Signals that ask a run to stop, noted from the first moment of the process.

A signal may come in the middle of anything, so the handler only sets a flag, and rank 0 says so with one system call.
Batch systems send SIGTERM before they kill, and SIGUSR1 if asked to (``sbatch --signal``). They may do so while a rank
still imports torch; without a handler SIGUSR1 ends it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from hpczero.errors import launched_by_open_mpi, launcher_rank


class Signals:
    """Context manager that listens to signals. Use it in the main thread only.

    At its end SIGTERM is handled as before, and SIGUSR1 is ignored. A run that stops has got SIGUSR1, but the job's
    script sends it again in case a rank has not. By default it would then end a rank that is finalizing MPI.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None  # of SIGTERM; Any: what signal.signal returns
        # Open MPI's mpirun kills 1 s after it has passed SIGTERM on, also where Ctrl-C makes it send that (4.1.4).
        hint = ", unless mpirun kills before that (better: SIGUSR1 to mpirun, or a file STOP)"
        self._unless = hint if launched_by_open_mpi() else ""

    def __enter__(self) -> Signals:
        self._before = signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._before)

    @property
    def came(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._came and launcher_rank() == 0:
            unless = self._unless if number == signal.SIGTERM else ""
            text = (
                f"[rank 0] asked to stop ({signal.Signals(number).name}): after this step{unless}\n"
            )
            with suppress(OSError):
                os.write(2, text.encode())
        self._came = True
