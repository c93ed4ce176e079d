"""The sum over leaves is one binary tree, whoever brings the leaves, and in how many micro-steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero.kernels import tree_sum
from hpczero.kernels.tree_sum import LeafSum, carried

NUMEL = 5
SCALE = 1.0 / 3.0


def tree(leaves: list[np.ndarray]) -> np.ndarray:
    """The definition: split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 2 ** ((len(leaves) - 1).bit_length() - 1)
    return tree(leaves[:half]) + tree(leaves[half:])


def leaves_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-12, 12, (count, NUMEL), generator=generator)
    return [*(torch.randn(count, NUMEL, generator=generator) * torch.exp2(exponents))]


def expected(leaves: list[Tensor]) -> np.ndarray:
    return tree([leaf.float().numpy() for leaf in leaves]) * np.float32(SCALE)


def summed(leaves: list[Tensor], ranks: int, *, of_node: int = 1) -> Tensor:
    """As ``ranks`` ranks sum them, in nodes of ``of_node`` ranks that bring one sum each."""
    count, idle = len(leaves), torch.full((NUMEL,), torch.nan, dtype=leaves[0].dtype)
    most = max((carried(k) for k in range(ranks, count, ranks)), default=1)
    out = torch.full((NUMEL,), torch.nan)
    carries = [out, *(torch.full((NUMEL,), torch.nan) for _ in range(most - 1))]
    for first in range(0, count, ranks):
        here = leaves[first : first + ranks]
        into = LeafSum(
            out,
            SCALE,
            carries=carries,
            before=first,
            count=len(here),
            last=first + ranks >= count,
        )
        blocks = here + [idle] * (ranks - len(here))
        if of_node > 1:
            nodes = [blocks[i : i + of_node] for i in range(0, ranks, of_node)]
            blocks = [idle.clone() for _ in nodes]
            for node, block in enumerate(blocks):
                into.sum_of_node(into.of_node(nodes[node], node), block)
        for start in (0, 2):  # a transport brings a shard in pieces
            piece = slice(start, 2 if start == 0 else NUMEL)
            into.take(
                [block[piece] for block in blocks],
                start,
                groups=[range(len(blocks))],
                ranks=of_node,
            )
    return out


@pytest.mark.parametrize("count", range(1, 65))
def test_every_number_of_ranks_gives_the_tree(count: int) -> None:
    leaves = leaves_of(count)
    wanted = expected(leaves).tobytes()
    wrong = [n for n in range(1, count + 1) if summed(leaves, n).numpy().tobytes() != wanted]
    assert not wrong, f"{count} leaves on these numbers of ranks have other bits"


@pytest.mark.parametrize("of_node", [2, 4, 8])
def test_sums_of_nodes_are_branches_of_the_tree(of_node: int) -> None:
    for count in range(of_node, 40):
        leaves = leaves_of(count)
        for ranks in range(of_node, count + 1, of_node):
            found = summed(leaves, ranks, of_node=of_node)
            assert found.numpy().tobytes() == expected(leaves).tobytes(), (count, ranks)


def test_half_precision_leaves_are_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_sum, "PIECE_NUMEL", 2)
    leaves = [leaf.bfloat16() for leaf in leaves_of(11)]
    for ranks in (1, 3, 11):
        assert summed(leaves, ranks).numpy().tobytes() == expected(leaves).tobytes()


def test_a_transport_that_leaves_blocks_alone_finds_them_as_they_were() -> None:
    leaves = leaves_of(7)
    before = [leaf.clone() for leaf in leaves]
    summed(leaves, 7)
    summed(leaves, 2)
    assert all(map(torch.equal, leaves, before))
