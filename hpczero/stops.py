"""Asked to stop, or to save: by a signal, or by a file in the run folder.

Owns: the signals, the files, and that all ranks hear it at the same step. Must not know: training, checkpoints.

A handler sets a flag and nothing else: a signal comes in the middle of anything. Batch systems send SIGTERM before they
kill, and SIGUSR1 where asked to (``sbatch --signal``); often to some ranks only.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpczero.topology import Topology

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Wish(IntEnum):
    """What is asked for; the greater one wins."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Stops:
    """Context manager that listens; the handlers of before come back at its end."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        """Not collective.

        Args:
            folder: where files named STOP and SAVE are looked for, on rank 0.
            topology: borrowed.
        """
        self._folder = folder
        self._topology = topology
        self._signalled = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stops:
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def wish(self) -> Wish:
        """What anybody has asked for since the last call, the same on every rank. Collective over world."""
        mine = Wish.STOP if self._signalled else Wish.NOTHING
        if self._topology.is_root:
            for wish in (Wish.SAVE, Wish.STOP):
                if (self._folder / wish.name).exists():
                    mine = max(mine, wish)
        agreed = Wish(int(max(self._topology.gather(float(mine)))))
        if self._topology.is_root and agreed is not Wish.NOTHING:
            for wish in (Wish.SAVE, Wish.STOP):
                if wish <= agreed:
                    with suppress(OSError):
                        (self._folder / wish.name).unlink()
        return agreed
