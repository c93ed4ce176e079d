"""A sum of many blocks by launches that read few: the bits of the one sum, for any numbers of blocks and groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpczero.kernels.source import MOST_BLOCKS
from hpczero.kernels.tree_sum import Launch, groups_in_order, levels, sum_by_launches, tree_sum

NUMEL = 67


def random_blocks(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Magnitudes far apart, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-4, 4, (count, NUMEL), generator=generator)
    return list((torch.randn(count, NUMEL, generator=generator) * scales).to(dtype).unbind())


def permuted(sizes: list[int]) -> list[list[int]]:
    """Groups of these sizes over blocks in another order."""
    generator = torch.Generator().manual_seed(sum(sizes))
    order = torch.randperm(sum(sizes), generator=generator).tolist()
    return [[order[i] for i in group] for group in groups_in_order(sizes)]


def check(sizes: list[int], dtype: torch.dtype, node_dtype: torch.dtype, most: int) -> None:
    blocks, groups = random_blocks(sum(sizes), dtype), permuted(sizes)
    expected = torch.full((NUMEL,), 0.7)
    found = expected.clone()
    tree_sum(blocks, expected, groups=groups, scale=0.3, accumulate=True, node_dtype=node_dtype)

    def launch(one: Launch) -> bool:
        assert len(one.blocks) <= most
        tree_sum(
            one.blocks,
            one.out,
            groups=groups_in_order(one.sizes),
            scale=one.scale,
            accumulate=one.accumulate,
            node_dtype=node_dtype,
        )
        return True

    assert sum_by_launches(
        blocks, found, groups=groups, scale=0.3, accumulate=True, launch=launch, most=most
    )
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), sizes


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(4, 9),
)
def test_the_bits_are_those_of_one_sum(sizes, dtype, node_dtype, most):
    check(sizes, dtype, node_dtype, most)


@pytest.mark.parametrize(
    "sizes", [[33], [400], [2049], [1] * 33, [1] * 1100, [8] * 50, [4] * 100, [7, 3] * 20, [40, 1]]
)
def test_the_bits_are_those_of_one_sum_on_many_ranks(sizes):
    check(sizes, torch.bfloat16, torch.bfloat16, MOST_BLOCKS)


def test_few_blocks_are_one_launch_and_many_groups_are_read_once():
    assert levels([range(20), range(20, 32)], 32) == ((((*range(20),), (*range(20, 32),)),),)
    first, second = levels([range(8 * n, 8 * n + 8) for n in range(8)], 32)
    assert [len(launch) for launch in first] == [4, 4]  # nodes summed, rounded and added at once
    assert second == (((0, 1),),)


def test_a_launch_that_cannot_be_made_leaves_the_sum_as_it_was():
    out = torch.ones(NUMEL)
    asked: list[Launch] = []

    def refuses(one: Launch) -> bool:
        asked.append(one)
        return False

    blocks = random_blocks(40, torch.float32)
    assert not sum_by_launches(
        blocks, out, groups=[range(40)], scale=1.0, accumulate=False, launch=refuses
    )
    assert len(asked) == 1
    assert torch.equal(out, torch.ones(NUMEL))
