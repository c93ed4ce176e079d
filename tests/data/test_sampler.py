"""The shuffle: a permutation per epoch, fixed by (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import Sampler

SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 64, 65, 97, 1000, 4099, 2**16, 104_729]


def epoch(sampler: Sampler, index: int) -> np.ndarray:
    start = index * sampler.num_samples
    return sampler.samples(np.arange(start, start + sampler.num_samples))


@pytest.mark.parametrize("num_samples", SIZES)
def test_every_epoch_holds_every_sample_once(num_samples: int) -> None:
    sampler = Sampler(num_samples, seed=3)
    for index in (0, 1, 2, 10**9):
        assert np.array_equal(np.sort(epoch(sampler, index)), np.arange(num_samples))


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = [epoch(Sampler(1000, seed), index) for seed in (0, 1, -1, 2**63) for index in (0, 1)]
    for index, order in enumerate(orders):
        for other in orders[index + 1 :]:
            # two random permutations agree in one place on average
            assert (order == other).sum() < 10


@given(
    num_samples=st.integers(1, 10**12),
    seed=st.integers(-(2**70), 2**70),
    positions=st.lists(st.integers(0, 10**14), max_size=20),
)
def test_positions_one_by_one_equal_positions_at_once(
    num_samples: int, seed: int, positions: list[int]
) -> None:
    sampler = Sampler(num_samples, seed)
    together = sampler.samples(np.array(positions, dtype=np.int64))
    alone = [Sampler(num_samples, seed).sample(position) for position in positions]
    assert together.dtype == np.int64
    assert together.tolist() == alone
    assert all(0 <= index < num_samples for index in alone)


def test_order_is_spread_like_a_random_one() -> None:
    order = epoch(Sampler(10_007, seed=0), 0)
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    trend = np.corrcoef(order, np.arange(len(order)))[0, 1]
    assert abs(neighbours) < 0.04  # four standard deviations, 1 / sqrt(n) each
    assert abs(trend) < 0.04
    in_first_tenth = np.histogram(order[:1000], bins=10, range=(0, len(order)))[0]
    assert in_first_tenth.min() > 60
    assert in_first_tenth.max() < 145


@pytest.mark.parametrize("num_samples", [2, 3, 5])
def test_small_corpora_are_shuffled_without_favourites(num_samples: int) -> None:
    first = [Sampler(num_samples, seed).sample(0) for seed in range(600)]
    counts = np.bincount(first, minlength=num_samples)
    assert np.abs(counts - 600 / num_samples).max() < 5 * np.sqrt(600 / num_samples)


def test_order_does_not_change_between_versions() -> None:
    # A run resumed by a newer hpczero must see the samples it has not seen yet.
    assert epoch(Sampler(10, seed=0), 0).tolist() == [5, 6, 8, 2, 7, 4, 1, 3, 9, 0]


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0 samples"):
        Sampler(0, seed=0)
    with pytest.raises(ValueError, match="got position -1"):
        Sampler(5, seed=0).sample(-1)
