"""How sure one is of a time that was measured by several jobs, each of many steps.

Owns: the resampling. Must not know: what was measured. Steps of one job share its nodes, its placement and its
neighbours, so a thousand steps of one job say nothing of another allocation. Where there are several jobs they are
drawn first, and then steps within each that was drawn; the same draws every time.

Source: Davison and Hinkley, Bootstrap Methods and their Application (1997), sec. 3.8 (hierarchical data); for a single
job Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from scaling.evidence.spread import CONFIDENCE, Spread, interval_rank

RESAMPLES = 2000

Jobs = Sequence[Sequence[float]]  # of each job its steps


@dataclass(frozen=True)
class Ratio:
    """A ratio to the base; at the base itself exactly 1.

    Attributes:
        value: of the medians.
        low, high: what surrounds it.
        is_interval: whether they are a 95 % interval; else there were too few jobs, or steps, for one.
    """

    value: float
    low: float
    high: float
    is_interval: bool = True

    def times(self, factor: float) -> Ratio:
        """The same, of a multiple."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor, self.is_interval)


def spread_of_jobs(jobs: Jobs) -> Spread:
    """The median of the jobs' medians, and its interval.

    One job: that of order statistics over its steps (`scaling.evidence.spread`). Several: that of the bootstrap.
    """
    if len(jobs) == 1:
        return Spread.of(jobs[0])
    low, high = _quantiles(_draw(jobs, np.random.default_rng(0)))
    count = sum(len(steps) for steps in jobs)
    return Spread(_middle(jobs), low, high, count, _are_enough(jobs))


def ratio_of_jobs(numerator: Jobs, denominator: Jobs) -> Ratio:
    """One median of jobs over another, with a percentile bootstrap."""
    draw = np.random.default_rng(0)
    low, high = _quantiles(_draw(numerator, draw) / _draw(denominator, draw))
    both = _are_enough(numerator) and _are_enough(denominator)
    return Ratio(_middle(numerator) / _middle(denominator), low, high, both)


def _are_enough(jobs: Jobs) -> bool:
    """Whether the smallest and the largest of so many values enclose a median 19 times out of 20."""
    return interval_rank(len(jobs[0]) if len(jobs) == 1 else len(jobs)) > 0


def _middle(jobs: Jobs) -> float:
    return median(median(steps) for steps in jobs)


def _draw(jobs: Jobs, draw: np.random.Generator) -> np.ndarray:
    """(RESAMPLES,) medians of as many jobs, drawn with replacement, of as many steps each, likewise."""
    drawn = draw.integers(len(jobs), size=(RESAMPLES, len(jobs)))
    medians = np.empty(drawn.shape)
    for job, steps in enumerate(jobs):
        values, (rows, columns) = np.asarray(steps), np.nonzero(drawn == job)
        of_steps = draw.integers(len(values), size=(len(rows), len(values)))
        medians[rows, columns] = np.median(values[of_steps], axis=1)
    found: np.ndarray = np.median(medians, axis=1)
    return found


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
