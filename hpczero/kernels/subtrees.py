"""A sum of any number of blocks as launches that read few blocks each: subtrees first, then the tree over their sums.

Owns: where the tree of ``tree_sum`` is cut, and the order of launches. Must not know: devices, how a launch is made.

The tree halves a sequence again and again, so all parts of one depth are trees of their own, and the tree over the
parts is the rest of the whole one. Cut there, every addition has the operands that it has in one launch: the same bits.

    40 blocks, at most 32      level 0   blocks 0..19 -> s0 | blocks 20..39 -> s1      fp32, not scaled
                               level 1   s0, s1 -> out                                 scaled, accumulated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from hpczero.kernels.source import MOST_BLOCKS

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]
Level = tuple[Groups, ...]


@dataclass(frozen=True)
class Launch:
    """One sum of few blocks.

    Attributes:
        blocks: (numel,) or (rows, numel) each, of one dtype, group by group; rows of equal strides.
        sizes: blocks of each group.
        out: fp32 of the same shape.
        scale: multiplies the sum once.
        accumulate: whether to add to what ``out`` holds.
    """

    blocks: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    out: Tensor
    scale: float
    accumulate: bool


def sum_by_launches(
    blocks: Sequence[Tensor],
    out: Tensor,
    *,
    groups: Sequence[Sequence[int]],
    scale: float,
    accumulate: bool,
    launch: Callable[[Launch], bool],
    most: int = MOST_BLOCKS,
) -> bool:
    """``tree_sum`` of any number of blocks by sums of at most ``most``, in order, each with its bits.

    Args:
        blocks: as in ``tree_sum``.
        out: as in ``tree_sum``. It is written by the last launch alone.
        groups: as in ``tree_sum``.
        scale: as in ``tree_sum``; of the last launch.
        accumulate: as in ``tree_sum``; of the last launch.
        launch: starts one sum, which rounds partial sums as ``tree_sum`` does; False where it cannot.
        most: as in ``levels``.

    Returns:
        Whether all were started; if not, ``out`` is as it was.
    """
    *lower, (last,) = _levels(tuple(tuple(group) for group in groups), most)
    there = list(blocks)
    for level in lower:
        sums = [torch.empty_like(out) for _ in level]
        for part, into in zip(level, sums, strict=True):
            if not launch(_launch(there, part, into, 1.0, False)):
                return False
        there = sums
    return launch(_launch(there, last, out, scale, accumulate))


@lru_cache(maxsize=64)
def _levels(groups: Groups, most: int) -> tuple[Level, ...]:
    """``levels``, which training asks for again and again with the same few groups: 25 us of 49 nodes' each."""
    return levels(groups, most)


def _launch(
    blocks: Sequence[Tensor], groups: Groups, out: Tensor, scale: float, accumulate: bool
) -> Launch:
    in_order = tuple(blocks[i] for group in groups for i in group)
    return Launch(in_order, tuple(map(len, groups)), out, scale, accumulate)


def groups_in_order(sizes: Sequence[int]) -> list[range]:
    """Groups of these sizes over blocks that follow one another."""
    ends = list(running_sums(sizes, initial=0))
    return [range(start, stop) for start, stop in pairwise(ends)]


def levels(groups: Sequence[Sequence[int]], most: int) -> tuple[Level, ...]:
    """The launches of a sum, level by level; the last level has one.

    Args:
        groups: indices of blocks, node by node, as in ``tree_sum``.
        most: blocks that one launch reads at most; 4 or more.

    Returns:
        Each launch as the ``groups`` of its own ``tree_sum``. Those of the first level index the blocks. Those of
        another index the fp32 sums of the level before.
    """
    assert most >= 4, "a cut of several groups leaves two or more in each part"
    whole = tuple(tuple(group) for group in groups)
    if sum(map(len, whole)) <= most:
        return ((whole,),)
    if len(whole) > 1:
        parts = _parts_of_groups(whole, most)
        if parts is not None:  # each rounds its groups' sums, and nothing is rounded later
            return (parts, *levels([range(len(parts))], most))
    cuts = [_cut(group, most) for group in whole]
    launches: list[Groups] = []
    rest: list[range] = []
    for cut in cuts:
        rest.append(range(len(launches), len(launches) + len(cut)))
        launches += [(part,) for part in cut]
    return (tuple(launches), *levels(rest, most))


def _parts_of_groups(groups: Groups, most: int) -> Level | None:
    """Whole groups, two or more in each part: one group alone would not be rounded. None if they are too large."""
    parts: tuple[Groups, ...] = (groups,)
    while all(len(part) >= 4 for part in parts):
        parts = tuple(half for part in parts for half in _halves(part))
        if all(sum(map(len, part)) <= most for part in parts):
            return parts
    return None


def _cut(group: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    parts: tuple[tuple[int, ...], ...] = (group,)
    while max(map(len, parts)) > most:
        parts = tuple(half for part in parts for half in _halves(part))
    return parts


def _halves(part: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """As ``tree_sum`` halves: the first is the larger."""
    middle = (len(part) + 1) // 2
    return part[:middle], part[middle:]
