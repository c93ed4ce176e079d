"""Codes: gradients that travel between nodes in few bits, with the same bits on every transport.

    each rank    the sum of a node in fp32, exact    ->  a row of codes for the owner of each shard
    the owner    the rows of all nodes, its own too  ->  decoded, and summed in fp32 in the order of the nodes

Nothing is encoded twice, and nothing is encoded inside a node. Step, reduction, unit, node and the number of the
element draw a code. So the bits depend neither on the transport nor on the rounds that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hpczero.kernels.codes import BLOCK, Key, decode, encode, key_of
from hpczero.plan.layout import Coding


@dataclass(frozen=True)
class CodedGradient:
    """The gradient of one unit in one reduction, as it travels between nodes.

    Attributes:
        coding: which elements are codes.
        which: names the reduction, and draws the codes together with the node.
    """

    coding: Coding
    which: str

    def encode(self, sums: Tensor, row: Tensor, *, shard: int, start: int, node: int) -> None:
        """Set ``row`` to the codes of a part of the sum of ``node``. Not collective.

        Args:
            sums: (count,) fp32.
            row: (coding.words(start, count),) fp32, whose bits hold the codes.
            shard: number of the shard that the elements are of.
            start: first of them, a multiple of 64 from the shard's start.
            node: number of the node whose sum it is.
        """
        coding, count = self.coding, len(sums)
        words = coding.codec.words(count)
        first = shard * coding.layout.shard_numel + start
        encode(sums, row[:words], coding.codec.name, key=_key(self.which, node), first=first)
        exact = coding.exact(shard, start, count)
        row[words:].zero_()
        if exact:
            blocks = sums.view(-1, BLOCK)[_numbers(exact, sums.device)]
            row[words : words + blocks.numel()].copy_(blocks.view(-1))

    def decode(self, rows: Tensor, sums: Tensor, *, shard: int, start: int) -> None:
        """Set ``sums`` (nodes, count) fp32 to what ``rows`` (nodes, words) of one shard say. Not collective."""
        coding, count = self.coding, sums.shape[1]
        words = coding.codec.words(count)
        decode(rows, sums, coding.codec.name)
        if exact := coding.exact(shard, start, count):
            blocks = rows[:, words : words + len(exact) * BLOCK].reshape(len(rows), -1, BLOCK)
            sums.view(len(rows), -1, BLOCK)[:, _numbers(exact, sums.device)] = blocks


@lru_cache(maxsize=1024)  # rounds of one reduction ask again
def _key(which: str, node: int) -> Key:
    return key_of(f"{which}, node {node}")


def _numbers(blocks: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(blocks, device=device, dtype=torch.int64)
