"""The one sum, against the same order written out by hand in NumPy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero.kernels.tree_sum import PIECE_NUMEL, tree_sum
from tests.kernels.reference import IN_ORDER, exact, to_bf16_and_back


def random_blocks(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Magnitudes far apart, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(count * 7919 + numel)
    values = torch.randn(count, numel, generator=generator)
    return list((values * torch.logspace(-3, 3, count)[:, None]).to(dtype).unbind())


@pytest.mark.parametrize("count", sorted(IN_ORDER))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_on_one_node_is_the_balanced_tree_in_fp32(count, dtype):
    blocks, out = random_blocks(count, 133, dtype), torch.full((133,), torch.nan)
    tree_sum(blocks, out, groups=[range(count)], scale=1.0)
    expected = IN_ORDER[count](*exact(blocks))
    assert out.numpy().tobytes() == expected.tobytes()


def test_another_order_gives_other_bits():
    # or the comparisons in this file would show nothing
    a, b, c, d, e = exact(random_blocks(5, 133))
    assert ((((a + b) + c) + d) + e).tobytes() != IN_ORDER[5](a, b, c, d, e).tobytes()


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]]])
def test_nodes_are_summed_first_then_over_nodes(groups):
    blocks, out = random_blocks(4, 133), torch.empty(133)
    tree_sum(blocks, out, groups=groups, scale=1.0)
    values = exact(blocks)
    nodes = [IN_ORDER[len(group)](*(values[i] for i in group)) for group in groups]
    assert out.numpy().tobytes() == IN_ORDER[len(nodes)](*nodes).tobytes()


def test_partial_sum_of_each_node_is_rounded_once_to_node_dtype():
    blocks, out = random_blocks(6, 133), torch.empty(133)
    tree_sum(blocks, out, groups=[[0, 3], [1, 4], [2, 5]], scale=1.0, node_dtype=torch.bfloat16)
    v = exact(blocks)
    nodes = [to_bf16_and_back(v[i] + v[i + 3]) for i in range(3)]
    assert out.numpy().tobytes() == IN_ORDER[3](*nodes).tobytes()


def test_one_node_is_not_rounded():
    blocks, out, half = random_blocks(3, 133), torch.empty(133), torch.empty(133)
    tree_sum(blocks, out, groups=[[0, 1, 2]], scale=1.0)
    tree_sum(blocks, half, groups=[[0, 1, 2]], scale=1.0, node_dtype=torch.bfloat16)
    assert torch.equal(out, half)


@pytest.mark.parametrize("scale", [1.0 / 3.0, 2.0**-16, 0.0])
def test_scale_multiplies_the_sum_once(scale):
    blocks, out = random_blocks(3, 133), torch.empty(133)
    tree_sum(blocks, out, groups=[[0, 1, 2]], scale=scale)
    expected = IN_ORDER[3](*exact(blocks)) * np.float32(scale)
    assert out.numpy().tobytes() == expected.tobytes()


def test_accumulate_rounds_the_scaled_sum_before_it_is_added():
    # a fused multiply-add rounds once: other bits on processors that have it, and at the ends of vectors
    blocks, out = random_blocks(3, 1001), torch.full((1001,), 0.1)
    tree_sum(blocks, out, groups=[[0, 1, 2]], scale=1.0 / 3.0, accumulate=True)
    scaled = IN_ORDER[3](*exact(blocks)) * np.float32(1.0 / 3.0)
    assert out.numpy().tobytes() == (np.float32(0.1) + scaled).tobytes()


@pytest.mark.parametrize("numel", [0, 1, PIECE_NUMEL, PIECE_NUMEL + 1, 2 * PIECE_NUMEL + 7])
@pytest.mark.parametrize("accumulate", [False, True])
def test_pieces_do_not_show(numel, accumulate):
    blocks, out = random_blocks(3, numel), torch.ones(numel)
    tree_sum(blocks, out, groups=[[0, 1, 2]], scale=0.5, accumulate=accumulate)
    expected = IN_ORDER[3](*exact(blocks)) * np.float32(0.5) + np.float32(accumulate)
    assert out.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("accumulate", [False, True])
def test_blocks_are_not_written(count, accumulate):
    blocks = random_blocks(count, 77)
    before = [block.clone() for block in blocks]
    groups = [range(count)]
    tree_sum(blocks, torch.zeros(77), groups=groups, scale=3.0, accumulate=accumulate)
    assert all(torch.equal(new, old) for new, old in zip(blocks, before, strict=True))
