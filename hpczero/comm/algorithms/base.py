"""The two contracts: gather blocks in place, exchange blocks.

Owns: chunking, and what every algorithm shares. Must not know: any algorithm.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

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


# How long a rank polls before it naps between polls, and how long a nap is: where ranks outnumber cores, the one that
# polls keeps the core from the one it waits for.
POLL_S = 100e-6
NAP_S = 50e-6


Prepare = Callable[[int, int], None]
"""Fills blocks ``first .. first + count - 1``, given ``first`` and ``count``."""
Meanwhile = Callable[[], None]


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Return when all requests are complete."""
    patient_from = time.perf_counter() + POLL_S
    while not MPI.Request.Testall(requests):
        if time.perf_counter() > patient_from:
            time.sleep(NAP_S)


class _Algorithm:
    """One algorithm on one communicator, which it borrows. ``free`` frees what the algorithm made.

    Attributes:
        messages: that this rank has sent; 0 where the MPI library decides.
    """

    name: ClassVar[str]
    in_rounds: ClassVar[bool] = False  # whether it pays to cut blocks into short rounds

    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        """Not collective.

        Args:
            comm: must outlive the algorithm. It carries nothing else while the algorithm runs.
            chunk_nbytes: most bytes of one block that a single MPI call moves.
        """
        self.comm = comm
        self.chunk_nbytes = chunk_nbytes
        self.types = BlockTypes()
        self.messages = 0

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the algorithm works on ``size`` ranks."""
        return size >= 1

    def free(self) -> None:
        """Free datatypes. Not collective."""
        self.types.free()


class Gather(_Algorithm, ABC):
    """All-gather of equal blocks, in place."""

    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        """Fill every block from its owner: rank i owns block i. Collective over the communicator.

        Args:
            blocks: one for each rank.
            round_nbytes: bytes of a block that travel in one round, if no more than ``chunk_nbytes``.
        """
        if blocks.count > 1:
            for piece in blocks.pieces(min(self.chunk_nbytes, round_nbytes)):
                self._gather(piece)
            self._finish()

    def _finish(self) -> None:
        """Return when every piece has arrived. Algorithms override it if pieces may still be on their way."""
        return

    @abstractmethod
    def _gather(self, blocks: Blocks) -> None: ...


class Exchange(_Algorithm, ABC):
    """All-to-all of equal blocks. Calls may overlap: each call completes the one before, ``finish`` the last one."""

    in_rounds = True
    takes_gaps: ClassVar[bool] = False  # blocks to send may lie apart, at no cost

    def __call__(
        self,
        send: Blocks,
        receive: Blocks,
        *,
        prepare: Prepare = lambda first, count: None,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Send block i of ``send`` to rank i; what rank i sends arrives in block i of ``receive``.

        Collective over the communicator. This rank's own block of ``receive`` has no defined content; read it from
        ``send``.

        Args:
            send: one block for each rank, none longer than ``chunk_nbytes``.
            receive: as many blocks, no overlap with ``send``.
            prepare: fills neighbouring blocks of ``send`` shortly before they leave. Every block is filled once, this
                rank's own included.
            meanwhile: called once, when the call before is complete and messages of this one are on their way.
        """
        self._exchange(send, receive, prepare, meanwhile)

    def finish(self) -> None:
        """Return when the last call is complete. Collective over the communicator."""
        return

    @abstractmethod
    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None: ...
