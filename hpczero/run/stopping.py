"""What ends a run early: a signal, a file in the run folder, the end of the job's time, a held-out loss that stays.

A signal often reaches only some ranks, and never all at the same step, so ranks agree between steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from hpczero.errors import ConfigError
from hpczero.files.regular import kind_of
from hpczero.job import log
from hpczero.job.launch import ask_time_left
from hpczero.job.signals import Signals
from hpczero.job.topology import Topology
from hpczero.options.environment import Environment

# When the job ends, and whether that is near.
#
# ``sbatch --signal`` gives notice a fixed time before the end. The deadline works without that option, and it knows how
# long a save of this run takes.

SAVES, STEPS = 3.0, 2.0  # what must fit: a slow file system takes thrice as long, a step twice
ENDING_S = 15.0  # and for the ranks to end, and the job's script to requeue
ASK_AGAIN_S = 60.0
REMEMBERED_STEPS = 16


class Deadline:
    """The end of a job. It is never near if the job has no time limit."""

    def __init__(
        self,
        environment: Environment,
        *,
        ask: Callable[[str], float | None] = ask_time_left,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Ask SLURM once, unless SLURM_JOB_END_TIME states the end.

        ``ask`` gives the seconds left of a job by its id; infinite without a limit, None if that is unknown.
        """
        self._job = environment.job_of_squeue
        self._ask = ask
        self._now = now
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._asked_at = -math.inf
        self._end = math.inf if environment.job_end is None else environment.job_end
        if self._job and environment.job_end is None:
            self._look()
            if self._end == math.inf:
                log.info(
                    "time limit: unknown or none; the run stops in time only if it is signalled"
                )

    @property
    def left_s(self) -> float:
        """Seconds until the job ends; infinite without a limit."""
        return self._end - self._now()

    def check_room(self, *, save_s: float) -> None:
        """Refuse a start whose job is too short for more than one step: it would stop at its first look.

        If such a job is requeued, it does one step at a time for ever. The time of a step is not known yet.

        Raises:
            ConfigError: three saves and the end of the job do not fit into what is left.
        """
        needed_s = SAVES * save_s + ENDING_S
        if not self._holds(needed_s):
            left_s = max(self.left_s, 0.0)
            raise ConfigError(
                f"time limit: {left_s:.0f} s are left of the job, and the run would stop {needed_s:.0f} s before its "
                f"end (three saves of {save_s:.1f} s, and {ENDING_S:.0f} s): after its first step, at every start. "
                "Ask for more time: TIME=... with the scripts in slurm/, else sbatch --time=..."
            )

    def is_near(self, *, step_s: float, save_s: float) -> bool:
        """Whether three saves, two steps (the slowest of the last ones) and the end of the job no longer fit."""
        self._steps.append(step_s)
        needed_s = SAVES * save_s + STEPS * max(self._steps) + ENDING_S
        if self._holds(needed_s):
            return False
        said = "time limit: %.0f s are left, %.0f s are needed with saves of %.1f s and steps of %.2f s: stopping"
        log.info(said, self.left_s, needed_s, save_s, max(self._steps))
        return True

    def _holds(self, needed_s: float) -> bool:
        if self.left_s < needed_s and self._now() - self._asked_at >= ASK_AGAIN_S:
            self._look()  # the limit may have been changed since
        return self.left_s >= needed_s

    def _look(self) -> None:
        self._asked_at = self._now()
        left = self._ask(self._job)
        if left is not None:
            self._end = self._now() + left


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
        """Not collective. In ``folder`` rank 0 looks for files named STOP and SAVE. Rank 0 alone asks ``deadline``."""
        self._folder = folder
        self._topology = topology
        self._signals = signals
        self._deadline = deadline
        self._deaf: set[Wish] = set()  # files that were heard and cannot be removed, or are none

    def wish(self, *, step_s: float = 0.0, save_s: float = 0.0) -> Wish:
        """What any rank was asked for since the last call, the same on every rank. Collective over world.

        ``step_s`` are seconds of this step, evaluation included, ``save_s`` those of a save; rank 0's count.
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


class Patience:
    """Whether the held-out loss still falls (``evaluation.patience``). It has the same state on every rank.

    Attributes:
        best: lowest held-out loss so far; None before the first.
        since: evaluations in a row that have not found a lower one.
    """

    def __init__(self, evaluations: int, topology: Topology, extra: Mapping[str, Any]) -> None:
        """Not collective. ``evaluations``: at most so many in a row; 0: any number. ``extra``: of a checkpoint."""
        self._most, self._topology = evaluations, topology
        self.best: float | None = extra.get("held_out_best")
        self.since: int = extra.get("held_out_since", 0)

    def note(self, loss: float) -> None:
        """Add the loss of one evaluation, as rank 0 has it. Collective over world, unless nobody asked for patience."""
        if not self._most:
            return
        loss = float(self._topology.broadcast_text(repr(loss)))
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.since = loss, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        """Whether the run ends now."""
        return 0 < self._most <= self.since

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint states of it, for ``extra`` of a later start; empty if nobody asked for patience."""
        return {"held_out_best": self.best, "held_out_since": self.since} if self._most else {}

    @property
    def why(self) -> str:
        """Why the run ends, for people."""
        best = "a finite number" if self.best is None else f"below {self.best:.4f}"
        return f"the held-out loss has not been {best} in {self.since} evaluations in a row"
