"""The flat transport: one MPI call over all ranks, whatever the nodes.

Owns: chunking and MPI datatypes. Must not know: units, stages. The reference every other transport must equal bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.comm.base import Collectives, Work
from hpczero.device import Buffer, Memory
from hpczero.kernels.tree_sum import tree_sum
from hpczero.layout import exchange_chunk
from hpczero.topology import Topology

# Below the 32-bit counts of MPI 3 with room to spare; also what an MPI library pipelines well.
CHUNK_BYTES = 256 * 2**20


class Flat(Collectives):
    """All-gather as one in-place MPI_Allgather; reduce-scatter as MPI_Alltoall of bytes and our own fp32 tree sum.

    On CPU nothing is gained by overlap when ranks fill the cores: calls block, and the Work they return is done.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        chunk_nbytes: int = CHUNK_BYTES,
    ) -> None:
        """Collective when ``strict``.

        Args:
            topology: as in Collectives.
            strict: as in Collectives.
            memory: as in Collectives.
            node_dtype: as in Collectives.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.
        """
        super().__init__(topology, strict=strict, memory=memory, node_dtype=node_dtype)
        self.chunk_nbytes = chunk_nbytes
        self._types: dict[tuple[int, int], MPI.Datatype] = {}
        self._exchange: Buffer | None = None

    def _all_gather(self, full: Tensor, shard_numel: int, name: str) -> Work:
        item = full.element_size()
        for start, count in _chunks(shard_numel, max(self.chunk_nbytes // item, 1)):
            block = self._block(count * item, shard_numel * item)
            window = _address(full, start * item)
            self.topology.shard.Allgather(MPI.IN_PLACE, [window, 1, block])
        return Work(name)

    def _reduce_scatter(
        self, full: Tensor, out: Tensor, shard_numel: int, scale: float, accumulate: bool, name: str
    ) -> Work:
        shard = self.topology.shard
        item = full.element_size()
        chunk = min(
            exchange_chunk(shard_numel, shard.size, item), max(self.chunk_nbytes // item, 1)
        )
        for start, count in _chunks(shard_numel, chunk):
            received = self._exchange_buffer(count * shard.size, full.dtype)
            shard.Alltoall(
                [_address(full, start * item), 1, self._block(count * item, shard_numel * item)],
                [_address(received, 0), 1, self._block(count * item, count * item)],
            )
            tree_sum(
                received.view(shard.size, count).unbind(),
                out[start : start + count],
                groups=self.topology.reduction_groups,
                scale=scale,
                accumulate=accumulate,
                node_dtype=self.node_dtype,
            )
        return Work(name)

    def _broadcast(self, full: Tensor, root: int, name: str) -> Work:
        item = full.element_size()
        for start, count in _chunks(full.numel(), max(self.chunk_nbytes // item, 1)):
            window = _address(full, start * item)
            self.topology.world.Bcast([window, count * item, MPI.BYTE], root=root)
        return Work(name)

    def close(self) -> None:
        """Free datatypes and the exchange buffer. Collective."""
        for block in self._types.values():
            block.Free()
        self._types.clear()
        if self._exchange is not None:
            self._exchange.release()
            self._exchange = None
        super().close()

    def _exchange_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Scratch for peers' blocks, kept and grown to the largest need, which exchange_chunk bounds."""
        nbytes = numel * dtype.itemsize
        if self._exchange is None or self._exchange.nbytes < nbytes:
            if self._exchange is not None:
                self._exchange.release()
            self._exchange = self.allocate(
                -(-nbytes // torch.float32.itemsize), torch.float32, category="exchange"
            )
        return self._exchange.tensor.view(dtype)[:numel]

    def _block(self, nbytes: int, extent: int) -> MPI.Datatype:
        """``nbytes`` bytes that repeat every ``extent`` bytes: block i lies in shard i. Extents are 64-bit."""
        if (nbytes, extent) not in self._types:
            block = MPI.BYTE.Create_contiguous(nbytes)
            resized = block.Create_resized(0, extent).Commit()
            block.Free()
            self._types[nbytes, extent] = resized
        return self._types[nbytes, extent]


def _chunks(numel: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, count) of consecutive chunks."""
    for start in range(0, numel, chunk):
        yield start, min(chunk, numel - start)


def _address(tensor: Tensor, offset: int) -> MPI.buffer:
    """The tensor's memory from byte ``offset`` on, for MPI. The caller keeps the tensor alive."""
    pointer = tensor.data_ptr() + offset
    return MPI.buffer.fromaddress(pointer, tensor.numel() * tensor.element_size() - offset)
