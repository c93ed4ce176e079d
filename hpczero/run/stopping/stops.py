"""Asked to stop or to save: by a signal, by a file in the run folder, or because the job's time is nearly up.

Owns: the files, and that all ranks know of it at the same step. Must not know: training, checkpoints, SLURM.

A signal often reaches only some ranks, and never all at the same step, so ranks agree between steps.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from pathlib import Path

from hpczero.files.regular import kind_of
from hpczero.job.topology import Topology
from hpczero.run.stopping.deadline import Deadline
from hpczero.run.stopping.signals import Signals

logger = logging.getLogger("hpczero.stops")


class Wish(IntEnum):
    """What is asked for; the greater one wins."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Stops:
    """What may end a run early."""

    def __init__(
        self, folder: Path, topology: Topology, signals: Signals, deadline: Deadline
    ) -> None:
        """Not collective.

        Args:
            folder: where files named STOP and SAVE are looked for, on rank 0.
            topology: topology of the run; borrowed.
            signals: those of this process; listening.
            deadline: when the job ends; only that of rank 0 is asked.
        """
        self._folder = folder
        self._topology = topology
        self._signals = signals
        self._deadline = deadline
        self._deaf: set[Wish] = set()  # files that were heard and cannot be removed, or are none

    def wish(self, *, step_s: float = 0.0, save_s: float = 0.0) -> Wish:
        """What any rank was asked for since the last call, the same on every rank. Collective over world.

        Args:
            step_s: seconds of this step, evaluation included; that of rank 0 counts.
            save_s: seconds of a checkpoint; that of rank 0 counts.
        """
        mine = Wish.STOP if self._signals.came else Wish.NOTHING
        if self._topology.is_root:
            for wish in (Wish.SAVE, Wish.STOP):
                if self._is_asked_for(wish):
                    mine = max(mine, wish)
            if mine is not Wish.STOP and self._deadline.is_near(step_s=step_s, save_s=save_s):
                mine = Wish.STOP
        agreed = Wish(self._topology.world.largest(mine))
        if self._topology.is_root and agreed is not Wish.NOTHING:
            for wish in (Wish.SAVE, Wish.STOP):
                if wish <= agreed:
                    self._take_away(wish)
        return agreed

    def _is_asked_for(self, wish: Wish) -> bool:
        path = self._folder / wish.name
        try:
            kind = kind_of(path)
        except OSError:
            return False
        if not kind:
            self._deaf.discard(wish)
        elif kind != "a file" and wish not in self._deaf:
            logger.warning("%s: is %s and asks for nothing; touch makes a file", path, kind)
            self._deaf.add(wish)
        return kind == "a file" and wish not in self._deaf

    def _take_away(self, wish: Wish) -> None:
        if wish in self._deaf:
            return
        path = self._folder / wish.name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # Or every step would save, and every start would stop.
            logger.warning("%s: cannot be removed (%s); not heard again until it is", path, error)
            self._deaf.add(wish)
