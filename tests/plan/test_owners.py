"""Owners of whole parameters: each holds a part, work is even, rounds are bounded."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.zero.update.whole import owners_of, rounds_of, work_of

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=20
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 6), st.integers(1, 100), st.randoms(use_true_random=False))
def test_every_parameter_has_one_owner_who_holds_a_part_and_one_round(shapes, ranks, limit, random):
    holders = [sorted(random.sample(range(ranks), random.randint(1, ranks))) for _ in shapes]
    owners = owners_of(shapes, holders)
    assert all(owner in held for owner, held in zip(owners, holders, strict=True))
    rounds = rounds_of(shapes, owners, limit)
    assert sorted(job for jobs in rounds for job in jobs) == list(range(len(shapes)))
    for jobs in rounds:
        whole: Counter[int] = Counter()
        count: Counter[int] = Counter()
        for job in jobs:
            whole[owners[job]] += prod(shapes[job])
            count[owners[job]] += 1
        assert all(numel <= limit or count[owner] == 1 for owner, numel in whole.items())


def test_equal_matrices_are_dealt_evenly_and_a_long_one_stands_alone():
    everybody = [range(4)] * 9
    assert sorted(Counter(owners_of([(8, 8)] * 8 + [(2,)], everybody)).values()) == [2, 2, 2, 3]
    owners = owners_of([(4, 4), (64, 64), (4, 4), (4, 4)], everybody[:4])
    assert owners.count(owners[1]) == 1


@pytest.mark.parametrize(
    ("shape", "work"), [((5,), 5), ((3, 7), 63), ((7, 3), 63), ((4, 3, 7), 252), ((), 1)]
)
def test_work_is_that_of_the_smaller_gram_matrix(shape, work):
    assert work_of(shape) == work
