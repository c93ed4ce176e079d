"""Medians with their spread, ratios formed within rounds, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from scaling.evidence.record import Row, of_kind

Round = TypeVar("Round")
Key = TypeVar("Key")
Shown = TypeVar("Shown")
Value = TypeVar("Value")

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

    def times(self, factor: float) -> Spread:
        """The same of ``factor`` times the values."""
        low, high = self.low * factor, self.high * factor
        return replace(self, median=self.median * factor, low=low, high=high)

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one or more values. Raises ValueError: no values."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("Spread: got no values, expected at least one")
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


def paired(
    numerator: Mapping[Round, float] | None, denominator: Mapping[Round, float] | None
) -> Spread | None:
    """Of ratios of what was measured in the same round; None where one was not measured, or no round has both."""
    others = denominator or {}
    pairs = [(v, others[k]) for k, v in (numerator or {}).items() if k in others]
    return Spread.of(value / other for value, other in pairs) if pairs else None


def by_round(
    rows: list[Row], kind: str, key: Callable[[Row], Key], value: Callable[[Row], Value]
) -> dict[Key, dict[int, Value]]:
    """Of the rows of one kind the values by key and round, keys in the order in which they come first."""
    found: dict[Key, dict[int, Value]] = {}
    for row in of_kind(rows, kind):
        found.setdefault(key(row), {})[row["round"]] = value(row)
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, first column to the left and the others to the right, aligned for a terminal too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * widths[0]}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows), ""])


def table_of(shown: Iterable[Shown], columns: Mapping[str, Callable[[Shown], str]]) -> str:
    """A table with a row for each of ``shown``; ``columns`` has the title and the cell of each column."""
    return table([*columns], [[cell(one) for cell in columns.values()] for one in shown])


def with_spread(spread: Spread | None, digits: int, scale: float = 1.0) -> str:
    """``median [low, high]``, each times ``scale``; a dash where nothing was measured."""
    if spread is None:
        return "–"
    middle, low, high = (
        f"{x * scale:.{digits}f}" for x in (spread.median, spread.low, spread.high)
    )
    return f"{middle} [{low}, {high}]"
