"""Batches: the same global batch for every world size, every held-out sample counted once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import Batches, EvaluationBatch, HeldOut, Sampler
from hpczero.data.batches import micro_batch_size
from hpczero.errors import ConfigError, DataError

TOKENS = np.arange(1003, dtype=np.uint16)


def global_batch(batches: Batches, step: int, world_size: int, accumulation: int) -> np.ndarray:
    parts = [
        batches.micro_batch(step, micro_step, rank, world_size, accumulation)[0]
        for micro_step in range(accumulation)
        for rank in range(world_size)
    ]
    return np.concatenate(parts)


@given(
    world_size=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    micro=st.integers(1, 5),
    seq_len=st.integers(1, 40),
    step=st.integers(0, 500),
    seed=st.integers(0, 9),
)
def test_micro_batches_tile_the_global_batch_in_order(
    world_size: int, accumulation: int, micro: int, seq_len: int, step: int, seed: int
) -> None:
    size = world_size * accumulation * micro
    batches = Batches(TOKENS, seq_len, size, seed)
    x = global_batch(batches, step, world_size, accumulation)
    # one position of the run after the other, whoever reads it; tokens are their own indices here
    sampler = Sampler((len(TOKENS) - 1) // seq_len, seed)
    starts = [sampler.sample(step * size + index) * seq_len for index in range(size)]
    assert x.tolist() == [list(range(start, start + seq_len)) for start in starts]


def test_targets_are_the_next_tokens() -> None:
    x, y = Batches(TOKENS, 9, 4, seed=0).micro_batch(3, 0, 1, 2)
    assert x.shape == y.shape == (2, 9)
    assert x.dtype == y.dtype == np.int64
    assert np.array_equal(y, x + 1)
    assert x.flags.c_contiguous
    assert y.flags.c_contiguous


def evaluated(micro: int, rank: int) -> EvaluationBatch:
    return next(HeldOut(TOKENS, 10).batches(micro_batch=micro, rank=rank, world_size=2))


IN_RANGE = "expected both in range"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: Batches(TOKENS, 9, 24, seed=0).micro_batch(0, 0, 0, 5, 2),
            r"global batch 24 .* world size 5 x accumulation 2 = 10; use a global batch of 20 or 30",
        ),
        (lambda: micro_batch_size(3, 4, 1), r"use a global batch of 4,"),
        (lambda: micro_batch_size(3, 0, 1), "world size 0"),
        (lambda: Batches(TOKENS, 9, 12, seed=0).micro_batch(0, 0, 2, 2, 3), IN_RANGE),
        (lambda: Batches(TOKENS, 9, 12, seed=0).micro_batch(0, 0, -1, 2, 3), IN_RANGE),
        (lambda: Batches(TOKENS, 9, 12, seed=0).micro_batch(0, 3, 0, 2, 3), IN_RANGE),
        (lambda: Batches(TOKENS, 9, 12, seed=0).micro_batch(0, -1, 0, 2, 3), IN_RANGE),
        (lambda: Batches(TOKENS, 0, 1, seed=0), "expected at least 1"),
        (lambda: Batches(TOKENS, 1, 0, seed=0), "expected at least 1"),
        (lambda: evaluated(0, 0), IN_RANGE),
        (lambda: evaluated(1, 2), IN_RANGE),
        (lambda: evaluated(1, -1), IN_RANGE),
        (lambda: HeldOut(TOKENS, 10, 0), "got 0 held-out samples"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_too_few_tokens_for_one_sample_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"training split has 9 tokens, .* length 9 needs 10"):
        Batches(TOKENS[:9], 9, 1, seed=0)
    with pytest.raises(DataError, match=r"held-out split has 9 tokens, .* length 9 needs 10"):
        HeldOut(TOKENS[:9], 9)
    assert Batches(TOKENS[:10], 9, 1, seed=0).sampler.num_samples == 1


def evaluation(held_out: HeldOut, micro: int, world_size: int) -> list[list[EvaluationBatch]]:
    return [
        list(held_out.batches(micro_batch=micro, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]


@given(
    world_size=st.integers(1, 7),
    micro=st.integers(1, 9),
    max_samples=st.one_of(st.none(), st.integers(1, 200)),
)
def test_held_out_samples_count_once_on_any_number_of_ranks(
    world_size: int, micro: int, max_samples: int | None
) -> None:
    held_out = HeldOut(TOKENS, 10, max_samples)
    assert len(held_out) == min(100, max_samples or 100)
    of_ranks = evaluation(held_out, micro, world_size)
    # a forward is collective: equally many on every rank, and never an empty one
    assert len({len(batches) for batches in of_ranks}) == 1
    assert all(1 <= len(batch.x) <= micro for batches in of_ranks for batch in batches)
    counted = [
        int(row[0])
        for batches in of_ranks
        for batch in batches
        for row in batch.x[: batch.num_samples]
    ]
    alone = [int(row[0]) for batch in evaluation(held_out, 1000, 1)[0] for row in batch.x]
    assert sorted(counted) == alone
    assert len(set(counted)) == len(held_out)


def test_a_row_counts_or_is_alone() -> None:
    batches = [batch for rank in evaluation(HeldOut(TOKENS, 10, 7), 2, 3) for batch in rank]
    assert sorted(batch.num_samples for batch in batches) == [0, 0, 1, 2, 2, 2]
    assert all(batch.num_samples in (0, len(batch.x)) for batch in batches)
    assert all(np.array_equal(batch.y, batch.x + 1) for batch in batches)


def test_held_out_samples_are_spread_over_the_split() -> None:
    starts = [int(row[0]) for row in evaluation(HeldOut(TOKENS, 10, 4), 4, 1)[0][0].x]
    assert starts == [0, 250, 500, 750]
