"""The pace of this machine now: limits of tests were written for one that has nothing else to do.

Owns: the piece of work that is timed, and how a limit stretches. Must not know: pytest, what is limited.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TURNS = 5_000_000
REFERENCE_S = 0.1  # that many turns on an EPYC core of 2021 which has nothing else to do
SLOWEST = 6.0  # a machine on which everything takes longer is not worth waiting for


def pace(clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times as long as written things take now, from 1 to ``SLOWEST``."""
    start = clock()
    for _ in range(TURNS):
        pass
    return min(max((clock() - start) / REFERENCE_S, 1.0), SLOWEST)


class Limit:
    """A limit in seconds that stretches if the machine turns out to be slow when it has passed.

    Attributes:
        allowed_s: what has been given so far, from the start.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self.allowed_s = seconds

    def more_s(self, measured: float) -> float:
        """Seconds to wait longer, now that ``allowed_s`` have passed and the pace is ``measured``; 0 for none."""
        stretched = self.seconds * measured
        more = stretched - self.allowed_s
        if more <= 0.1 * self.seconds:
            return 0.0
        self.allowed_s = stretched
        return more
