"""What the planner has foretold of a run, held against what its first steps show.

Owns: when that is said, and the words. Must not know: how anything was foretold. Nothing is changed in mid-run.
"""

from __future__ import annotations

import statistics

from hpczero.job import log
from hpczero.planner.choice import Foretold
from hpczero.planner.words import nbytes, seconds
from hpczero.run.results.metrics import process_peak_nbytes

STEPS = 10  # the first of them, which allocates, does not count


class Expectation:
    """Of one run; without a planner it says nothing. Not collective."""

    def __init__(self, foretold: Foretold | None) -> None:
        self._foretold = foretold
        self._seen: list[float] = []

    def note(self, step_s: float) -> None:
        """Add one step; after ``STEPS`` rank 0 says how it went."""
        if self._foretold is None:
            return
        self._seen.append(step_s)
        if len(self._seen) == STEPS:
            log.info("%s", line(self._foretold, statistics.median(self._seen[1:])))
            self._foretold = None


def line(foretold: Foretold, step_s: float) -> str:
    """Foretold and seen, with their ratio."""
    ratio = step_s / foretold.step_s
    peak = nbytes(process_peak_nbytes())
    return (
        f"planner: foretold {seconds(foretold.step_s)} a step, seen {seconds(step_s)} ({ratio:.2f} of it); foretold up "
        f"to {nbytes(foretold.run.most)} a rank beside Python, torch and MPI, seen {peak} with them"
    )
