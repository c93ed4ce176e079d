"""Equal blocks of one buffer, as MPI sees them.

Owns: addresses, strided datatypes, and the cut into calls of a size that every MPI library takes. Must not know: units,
sums, who needs the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor

# Below the 32-bit counts of MPI 3 with room to spare; also what an MPI library pipelines well.
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Blocks:
    """``count`` blocks of ``nbytes`` bytes each; block i starts ``i * stride`` bytes after the first.

    Attributes:
        tensor: keeps the memory alive.
        start: byte offset of block 0 in the tensor.
        nbytes: bytes of one block.
        stride: bytes from one block to the next, at least ``nbytes``; 64-bit.
        count: number of blocks.
    """

    tensor: Tensor
    start: int
    nbytes: int
    stride: int
    count: int

    @classmethod
    def of(cls, tensor: Tensor, start: int, numel: int, stride: int, count: int) -> Blocks:
        """Blocks by numbers of elements of ``tensor`` instead of bytes."""
        item = tensor.element_size()
        return cls(tensor, start * item, numel * item, stride * item, count)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Address, bytes, stride and number: blocks of equal places are the same memory."""
        address = self.tensor.data_ptr() + self.start
        return address, self.nbytes, self.stride, self.count

    def block(self, index: int) -> MPI.buffer:
        """Memory of one block, for MPI."""
        return MPI.buffer.fromaddress(
            self.tensor.data_ptr() + self.start + index * self.stride, self.nbytes
        )

    def view(self, index: int) -> Tensor:
        """(nbytes,) uint8 of one block; no copy."""
        start = self.start + index * self.stride
        return self.tensor.view(torch.uint8)[start : start + self.nbytes]

    def views(self, first: int, count: int) -> Tensor:
        """(count * nbytes,) uint8 of neighbouring blocks that lie without gaps; no copy."""
        start = self.start + first * self.stride
        return self.tensor.view(torch.uint8)[start : start + count * self.stride]

    def from_block(self, index: int) -> MPI.buffer:
        """Memory from one block to the end of the tensor, for a datatype that strides."""
        offset = self.start + index * self.stride
        size = self.tensor.numel() * self.tensor.element_size()
        return MPI.buffer.fromaddress(self.tensor.data_ptr() + offset, size - offset)

    def pieces(self, most_nbytes: int) -> Iterator[Blocks]:
        """The same blocks in pieces of at most ``most_nbytes``. Each item has one piece of every block."""
        for offset in range(0, self.nbytes, most_nbytes):
            nbytes = min(most_nbytes, self.nbytes - offset)
            yield Blocks(self.tensor, self.start + offset, nbytes, self.stride, self.count)


class BlockTypes:
    """Committed datatypes by (bytes, extent). MPI frees none by itself."""

    def __init__(self) -> None:
        self._types: dict[tuple[int, int], MPI.Datatype] = {}

    def get(self, nbytes: int, extent: int) -> MPI.Datatype:
        """A datatype of ``nbytes`` bytes that repeats every ``extent`` bytes."""
        if (nbytes, extent) not in self._types:
            block = MPI.BYTE.Create_contiguous(nbytes)
            self._types[nbytes, extent] = block.Create_resized(0, extent).Commit()
            block.Free()
        return self._types[nbytes, extent]

    def free(self) -> None:
        """Free all datatypes. Not collective."""
        for block in self._types.values():
            block.Free()
        self._types.clear()
