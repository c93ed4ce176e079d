"""Staging: all memory that passes through a tier, as equal blocks that are made once.

Owns: the blocks, and who has them. Must not know: the medium, records.

Constant buffers, and no fragmentation: C_B and M_D of Rajbhandari et al., ZeRO, SC20, sec. 6. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from hpczero.accelerator import Mark
from hpczero.errors import ConfigError, OutOfMemory, TierError
from hpczero.memory.pages import padded
from hpczero.tier.lanes import Transfer
from hpczero.tier.record import MOST_PARTS


class Block:
    """One block.

    Attributes:
        memory: (capacity,) uint8, aligned.
        holder: who has it, for messages.
        read_until: what the device has started with its bytes; whoever writes to it waits for that first.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.holder = ""
        self.read_until: Mark | None = None

    def when_free(self) -> None:
        """Return when the device no longer works with what lay here before."""
        if self.read_until is not None:
            self.read_until.wait()


class Staging:
    """A fixed count of equal blocks."""

    def __init__(
        self,
        count: int,
        block_nbytes: int,
        *,
        alignment: int,
        memory: Callable[[int, int], Tensor],
    ) -> None:
        """Make all blocks.

        Args:
            count: blocks.
            block_nbytes: bytes of parts that fit into one; the ends of their pages come on top.
            alignment: of every part, bytes, a power of two.
            memory: makes (nbytes,) uint8 for all of them, from bytes and alignment.

        Raises:
            ConfigError: no block, or empty ones.
            OutOfMemory: they do not fit.
        """
        if count < 1 or block_nbytes < 1:
            raise ConfigError(
                f"staging: got {count} blocks of {block_nbytes:,} bytes, expected at least 1 of each"
            )
        self.alignment = alignment
        self.block_nbytes = block_nbytes
        capacity = padded(block_nbytes, alignment) + MOST_PARTS * alignment
        try:
            whole = memory(count * capacity, alignment)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(
                f"staging: {count} blocks of {capacity:,} bytes do not fit ({error}); take fewer or smaller ones"
            ) from error
        self.nbytes = count * capacity
        self._blocks = [Block(part) for part in torch.split(whole, capacity)]
        self._free = list(self._blocks)
        self._writing: deque[tuple[Block, Transfer]] = deque()

    def take(self, nbytes: int, holder: str) -> Block:
        """A block for ``nbytes`` bytes of parts, content undefined; waits for the oldest write if none is free.

        Raises:
            TierError: a block is smaller; or all are held and none is being written, so that waiting would never end.
        """
        if nbytes > self.block_nbytes:
            raise TierError(
                f"{holder}: got {nbytes:,} bytes to stage at once, and a block of staging has {self.block_nbytes:,}; "
                "stage fewer parts at a time, cut the record into smaller ones, or make larger blocks"
            )
        if not self._free:
            if not self._writing:
                raise TierError(
                    f"{holder}: all {len(self._blocks)} blocks of staging are held ("
                    f"{'; '.join(block.holder for block in self._blocks)}) and none is on its way out; evict one "
                    "first, or make more blocks"
                )
            block, transfer = self._writing.popleft()
            transfer.settle()  # an error is told to whoever waits for it
            self._free.append(block)
        block = self._free.pop()
        block.holder = holder
        return block

    def give_back(self, block: Block, *, read_until: Mark | None = None) -> None:
        """The block is free, as soon as ``read_until`` has passed."""
        block.read_until = read_until
        self._free.append(block)

    def give_back_after(self, block: Block, transfer: Transfer) -> None:
        """The block is free when it is written."""
        block.read_until = None
        block.holder = transfer.name
        self._writing.append((block, transfer))
