"""Signals that ask a run to stop, noted from the first moment of the process.

Owns: which signals those are, and that they are noted. Must not know: MPI, torch, and what follows (``stops.py``).

A handler sets a flag and nothing else: a signal comes in the middle of anything. Batch systems send SIGTERM before they
kill, and SIGUSR1 where asked to (``sbatch --signal``), also while a rank still imports torch: unnoted, SIGUSR1 ends it.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """Context manager that listens; the handlers of before come back at its end. In the main thread only."""

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
