"""Windows: how a rank's shard of a unit is cut into what passes through memory at a time.

Owns: the cuts. Must not know: torch, tiers, optimizers.

A long tensor may be stepped on in pieces without changing a bit if every piece begins on a whole vector of the
processor, counted from where the long tensor begins: torch's fused kernels round the last elements of a tensor, which
fill no vector, in another way (torch 2.13). Neighbours of one optimizer group are one long tensor, so cuts lie at
multiples of ``ALIGN`` elements from where such neighbours begin, or between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hpczero.plan.layout import ShardLayout

ITEM = 4  # bytes of fp32
ALIGN = 64  # elements; a multiple of what any vector unit holds


def runs_of_groups(layout: ShardLayout, groups: Sequence[int], rank: int) -> list[range]:
    """Elements of ``rank``'s shard, counted in it, that are neighbours of one optimizer group; padding is in none.

    Args:
        layout: of the unit.
        groups: (slots,) optimizer group of each.
        rank: whose shard.
    """
    begin = rank * layout.shard_numel
    parts: list[tuple[int, range]] = []
    for slot, group in zip(layout.slots, groups, strict=True):
        part = layout.overlap(rank, slot.name)
        if part:
            start = slot.offset + part.start - begin
            parts.append((group, range(start, start + len(part))))
    found = []
    for _, neighbours in itertools.groupby(parts, key=lambda entry: entry[0]):
        ranges = [part for _, part in neighbours]
        found.append(range(ranges[0].start, ranges[-1].stop))
    return found


def cut(numel: int, runs: Sequence[range], most: int) -> list[range]:
    """Windows of at most ``most`` elements that together are ``range(numel)``.

    Args:
        numel: elements of the shard, padding included.
        runs: ascending; inside of each, cuts are aligned to its begin.
        most: elements; at least ``2 * ALIGN``.

    Raises:
        ValueError: ``most`` is too small.
    """
    if most < 2 * ALIGN:
        raise ValueError(f"a window has at least {2 * ALIGN} elements, got {most}")
    windows = []
    start = 0
    while start < numel:
        stop = min(start + most, numel)
        inside = next((run for run in runs if run.start < stop < run.stop), None)
        if inside is not None:
            stop = max(stop - (stop - inside.start) % ALIGN, start + 1)
        windows.append(range(start, stop))
        start = stop
    return windows


def windows_of(
    layout: ShardLayout, groups: Sequence[int], rank: int, window_nbytes: int, element_nbytes: int
) -> list[range]:
    """The windows of ``rank``'s shard of a unit, if all parts of an element pass together.

    Args:
        layout: of the unit.
        groups: (slots,) optimizer group of each.
        rank: whose shard.
        window_nbytes: of all parts of one window at most.
        element_nbytes: of all parts of one element.

    Raises:
        ValueError: ``window_nbytes`` is too small.
    """
    most = window_nbytes // element_nbytes // ALIGN * ALIGN
    return cut(layout.shard_numel, runs_of_groups(layout, groups, rank), most)
