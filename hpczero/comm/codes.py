"""Codes: gradients and parameters that travel between nodes in few bits, with the same bits on every transport.

    a reduction   each rank: the sum of a node in fp32, exact    ->  a row of codes for the owner of each shard
                  the owner: the rows of all nodes, its own too  ->  decoded, and summed in the order of the nodes
    a gather      the owner: its shard                           ->  a row of codes for every node
                  every rank, the owner too                      ->  the values that the row says

Nothing is encoded twice, and nothing is encoded inside a node. The step, the unit, what is sent (which reduction, of
which node) and the number of the element draw a code. So the bits depend neither on the transport nor on its rounds.
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
class SentCodes:
    """The gradient of one unit in one reduction, or its parameters in a gather, as they travel between nodes.

    Attributes:
        coding: which elements are codes.
        which: names what is sent, and draws the codes together with the node.
    """

    coding: Coding
    which: str

    def encode(
        self, values: Tensor, row: Tensor, *, shard: int, start: int = 0, node: int = 0
    ) -> None:
        """Set ``row`` to the codes of some values. Not collective.

        Args:
            values: (count,) fp32.
            row: (coding.words(start, count),) fp32, whose bits hold the codes.
            shard: number of the shard that the elements are of.
            start: first of them, a multiple of 64 from the shard's start.
            node: number of the node whose sum it is; 0 for parameters, of which there is one value.
        """
        coding, count = self.coding, len(values)
        words = coding.codec.words(count)
        first = shard * coding.layout.shard_numel + start
        encode(values, row[:words], coding.codec.name, key=_key(self.which, node), first=first)
        exact = coding.exact(shard, start, count)
        row[words:].zero_()
        if exact:
            blocks = values.view(-1, BLOCK)[_numbers(exact, values.device)]
            row[words : words + blocks.numel()].copy_(blocks.view(-1))

    def decode(self, rows: Tensor, values: Tensor, *, shard: int, start: int = 0) -> None:
        """Set ``values`` to what rows of one shard say. Not collective.

        Args:
            rows: (nodes, coding.words(start, count)) fp32.
            values: (nodes, count) of any floating dtype.
            shard: as of ``encode``.
            start: as of ``encode``.
        """
        coding, count = self.coding, values.shape[1]
        words = coding.codec.words(count)
        decode(rows, values, coding.codec.name)
        if exact := coding.exact(shard, start, count):
            blocks = rows[:, words : words + len(exact) * BLOCK].reshape(len(rows), -1, BLOCK)
            into = values.view(len(rows), -1, BLOCK)
            into[:, _numbers(exact, values.device)] = blocks.to(values.dtype)

    def round(self, full: Tensor) -> None:
        """Set parameters to what every rank has after a gather of them. Not collective.

        ``full``: (padded_numel,).
        """
        shards = self.coding.layout.num_shards
        for shard, values in enumerate(full.view(shards, -1)):
            row = torch.empty(self.words, dtype=torch.float32, device=full.device)
            self.encode(values.float(), row, shard=shard)
            self.decode(row.view(1, -1), values.view(1, -1), shard=shard)

    @property
    def words(self) -> int:
        """Words of 4 bytes of a row of a whole shard."""
        return self.coding.words(0, self.coding.layout.shard_numel)


@lru_cache(maxsize=1024)  # rounds of one reduction ask again
def _key(which: str, node: int) -> Key:
    return key_of(f"{which}, node {node}")


def _numbers(blocks: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(blocks, device=device, dtype=torch.int64)
