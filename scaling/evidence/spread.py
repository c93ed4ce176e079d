"""Medians with their spread, and ratios formed within rounds.

Owns: the arithmetic of a report. Must not know: what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Round = TypeVar("Round")

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A median and the interval around it.

    Attributes:
        median: of the values.
        low, high: the interval for the median that holds with 95 % confidence whatever the distribution; where there
            are too few values for one (five or fewer), the smallest and the largest.
        count: number of values.
        is_interval: whether ``low`` and ``high`` are that interval.
    """

    median: float
    low: float
    high: float
    count: int
    is_interval: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more values.

        Raises:
            ValueError: no values.
        """
        if not values:
            raise ValueError("Spread: got no values, expected at least one")
        ordered = sorted(values)
        rank = interval_rank(len(ordered))
        outside = max(rank, 1) - 1
        return cls(
            median=median(ordered),
            low=ordered[outside],
            high=ordered[len(ordered) - 1 - outside],
            count=len(ordered),
            is_interval=rank > 0,
        )


def interval_rank(count: int) -> int:
    """The r for which the r-th smallest and r-th largest of ``count`` values enclose the median often enough.

    The number of values below the median is binomial(count, 1/2), so they miss it with probability
    2 P(fewer than r values lie below). 0 where even the smallest and largest miss it too often.

    Source: Conover, Practical Nonparametric Statistics (1999), sec. 3.2.
    """
    missed, rank = 0.0, 0
    while rank < count:
        missed += 2 * math.comb(count, rank) / 2**count
        if missed > 1 - CONFIDENCE:
            return rank
        rank += 1
    return 0


def paired_ratios(
    numerator: Mapping[Round, float], denominator: Mapping[Round, float]
) -> list[float]:
    """Ratios of what was measured in the same round, for the rounds both have.

    Args:
        numerator: value by round.
        denominator: value by round.
    """
    return [value / denominator[key] for key, value in numerator.items() if key in denominator]
