"""The arithmetic of a report, against enumeration and by hand."""

from __future__ import annotations

import itertools

import pytest

from scaling.evidence.spread import CONFIDENCE, Spread, interval_rank, paired_ratios


def coverage(count: int, rank: int) -> float:
    """How often the rank-th smallest and largest of ``count`` values enclose the true median, by enumeration."""
    sides = list(itertools.product((False, True), repeat=count))  # below the median or above it
    return sum(rank <= sum(below) <= count - rank for below in sides) / len(sides)


@pytest.mark.parametrize("count", range(1, 14))
def test_interval_is_the_narrowest_that_holds_often_enough(count: int) -> None:
    rank = interval_rank(count)
    assert rank <= count // 2
    if rank:
        assert coverage(count, rank) >= CONFIDENCE
    assert coverage(count, rank + 1) < CONFIDENCE


def test_interval_ranks_equal_the_published_table() -> None:
    # Conover (1999), table A3 for p = 1/2, two-sided 95 %
    assert [interval_rank(n) for n in (5, 6, 9, 12, 20, 25)] == [0, 1, 2, 3, 6, 8]


def test_few_values_give_smallest_and_largest_and_say_so() -> None:
    spread = Spread.of([5.0, 1.0, 3.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (3.0, 1.0, 5.0, 3)
    assert not spread.is_interval


def test_outliers_on_both_sides_stay_outside_the_interval() -> None:
    spread = Spread.of([100.0, *range(10, 20), 0.0])
    assert (spread.median, spread.low, spread.high) == (14.5, 11.0, 18.0)
    assert spread.is_interval


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_are_formed_within_rounds_both_were_in() -> None:
    mine = {("a", 0): 2.0, ("a", 1): 4.0, ("b", 0): 9.0}
    theirs = {("a", 1): 8.0, ("a", 0): 4.0, ("c", 0): 1.0}
    assert paired_ratios(mine, theirs) == [0.5, 0.5]
