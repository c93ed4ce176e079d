"""When the job ends, and whether that is near.

Owns: the moment, and how much before it a run must stop. Must not know: MPI, how a run stops. Of use on one rank only.

``sbatch --signal`` gives notice a fixed time before the end. This is the second net: it needs no option, and it knows
how long a save of this very run takes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from hpczero import log
from hpczero.environment import Environment
from hpczero.slurm import ask_time_left

SAVES, STEPS = 3.0, 2.0  # what must fit: a slow file system takes thrice as long, a step twice
ENDING_S = 15.0  # and for the ranks to end, and the job's script to requeue
ASK_AGAIN_S = 60.0
REMEMBERED_STEPS = 16


class Deadline:
    """The end of a job that has a time limit; of any other it is never near."""

    def __init__(
        self,
        environment: Environment,
        *,
        ask: Callable[[str], float | None] = ask_time_left,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Asks SLURM once, unless SLURM_JOB_END_TIME has said it.

        Args:
            environment: with the job, and its end if SLURM tells it.
            ask: seconds left of a job by its id; None if that cannot be known.
            now: seconds since the epoch.
        """
        self._job = environment.job_of_squeue
        self._ask = ask
        self._now = now
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._asked_at = -math.inf
        self._end: float | None = environment.job_end
        if self._job and self._end is None:
            self._look()
            if self._end is None:
                log.info(
                    "time limit: unknown or none; the run stops in time only if it is signalled"
                )

    @property
    def left_s(self) -> float:
        """Seconds until the job ends; infinite where there is no limit."""
        return math.inf if self._end is None else self._end - self._now()

    def is_near(self, *, step_s: float, save_s: float) -> bool:
        """Whether three saves, two steps and the end of the job no longer fit into what is left.

        Args:
            step_s: seconds of the last step; the slowest of the last ones counts.
            save_s: seconds of a save.
        """
        self._steps.append(step_s)
        needed_s = SAVES * save_s + STEPS * max(self._steps) + ENDING_S
        if self.left_s >= needed_s:
            return False
        if self._now() - self._asked_at >= ASK_AGAIN_S:
            self._look()  # the limit may have been changed since
        if self.left_s >= needed_s:
            return False
        log.info(
            "time limit: %.0f s are left, %.0f s are needed with saves of %.1f s and steps of %.2f s: stopping",
            self.left_s,
            needed_s,
            save_s,
            max(self._steps),
        )
        return True

    def _look(self) -> None:
        self._asked_at = self._now()
        left = self._ask(self._job)
        if left is not None:
            self._end = self._now() + left
