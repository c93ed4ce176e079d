"""The arithmetic of a report, against enumeration and by hand; that of several jobs too."""

from __future__ import annotations

import itertools
from statistics import median

import numpy as np
import pytest

from scaling.evidence.spread import CONFIDENCE, Spread, interval_rank, paired
from scaling.sweep.curves import ratio_of_jobs, spread_of_jobs

CALM = [100.0 + 0.01 * step for step in range(100)]


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
    found = paired(mine, theirs)
    assert found is not None
    assert (found.low, found.high, found.count) == (0.5, 0.5, 2)


# --- jobs


def shifted(*offsets: float) -> list[list[float]]:
    return [[step + offset for step in CALM] for offset in offsets]


def test_one_job_has_the_interval_of_its_steps() -> None:
    assert spread_of_jobs([CALM]) == Spread.of(CALM)


def test_many_steps_of_few_allocations_do_not_hide_how_far_allocations_are_apart() -> None:
    jobs = shifted(0.0, 10.0, 20.0)
    found = spread_of_jobs(jobs)
    assert found.median == pytest.approx(median(CALM) + 10.0)
    assert found.high - found.low > 15.0
    pooled = Spread.of([step for job in jobs for step in job])
    assert found.high - found.low > 1.5 * (pooled.high - pooled.low)


def test_an_interval_takes_six_jobs_or_six_steps_of_one() -> None:
    assert not spread_of_jobs(shifted(*range(5))).is_interval
    assert spread_of_jobs(shifted(*range(6))).is_interval
    assert spread_of_jobs([CALM[:6]]).is_interval
    assert not spread_of_jobs([CALM[:5]]).is_interval
    assert not ratio_of_jobs([CALM], [CALM[:5]]).is_interval
    assert not ratio_of_jobs(shifted(0.0, 1.0), [CALM]).is_interval
    assert ratio_of_jobs([CALM], [CALM]).is_interval


def test_the_ratio_of_equal_points_varies_as_their_jobs_do() -> None:
    calm, apart = shifted(0.0, 0.0, 0.0), shifted(-30.0, 0.0, 30.0)
    near, far = ratio_of_jobs(calm, calm), ratio_of_jobs(apart, apart)
    assert near.median == far.median == 1.0
    assert near.high - near.low < 0.01
    assert far.low < 0.8
    assert far.high > 1.25
    assert ratio_of_jobs(apart, apart) == far  # the same draws every time


def test_intervals_hold_the_true_median_about_as_often_as_they_say() -> None:
    drawn, held = np.random.default_rng(1), 0
    for _ in range(40):
        of_jobs = 100.0 + drawn.normal(0.0, 5.0, 8)
        found = spread_of_jobs([list(drawn.normal(mean, 1.0, 20)) for mean in of_jobs])
        held += found.low <= 100.0 <= found.high
    assert held >= 34  # pooled steps would hold it in a third of the cases
