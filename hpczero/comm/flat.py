"""The flat transport: one communicator of all ranks, on any nodes.

Owns: which blocks go into one exchange. Must not know: units, stages, how blocks travel. It is the reference: every
other transport must equal it bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import (
    CHUNK_BYTES,
    Blocks,
    Exchange,
    Gather,
    LibraryExchange,
    LibraryGather,
)
from hpczero.comm.calls import Work
from hpczero.comm.collectives import Collectives
from hpczero.comm.devices import Reach
from hpczero.job.group import Group
from hpczero.job.topology import Topology
from hpczero.kernels.tree_sum import tree_sum
from hpczero.memory.buffers import Memory, Scratch
from hpczero.plan.footprint import exchange_chunk


class Flat(Collectives):
    """All-gather in place; reduce-scatter as an exchange of bytes and our own fp32 tree sum.

    Calls block, and the Work they return is done. Overlap gains nothing on a CPU whose cores the ranks fill.
    """

    def __init__(
        self,
        topology: Topology | Group,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        gather: type[Gather] = LibraryGather,
        exchange: type[Exchange] = LibraryExchange,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Not collective.

        Args:
            topology: as in Collectives.
            strict: as in Collectives.
            memory: as in Collectives.
            node_dtype: as in Collectives.
            gather: algorithm for all-gathers.
            exchange: algorithm for the exchange in reduce-scatters.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.
            reach: as in Collectives.
        """
        super().__init__(topology, strict=strict, memory=memory, node_dtype=node_dtype, reach=reach)
        over = self.reach
        self._gather = over.gather(gather, self.group.ordered, chunk_nbytes=chunk_nbytes)
        self._exchange = over.exchange(exchange, self.group.ordered, chunk_nbytes=chunk_nbytes)
        self._groups = self.group.reduction_groups
        self._received = Scratch(self.memory, category="exchange", device=self.device)

    @override
    def describe(self) -> str:
        return f"flat, all-gather {self._gather.name}, exchange {self._exchange.name}"

    def _all_gather(self, full: Tensor, shard_numel: int, name: str) -> Work:
        shards = self.group.size
        if shards == 1:
            return Work(name)
        self._gather(Blocks.of(full, 0, shard_numel, shard_numel, shards))
        return Work(name)

    def _reduce_scatter(
        self, full: Tensor, out: Tensor, shard_numel: int, scale: float, accumulate: bool, name: str
    ) -> Work:
        shards, me, item = self.group.size, self.group.index, full.element_size()
        if shards == 1:  # nothing to exchange, and nothing to wait for
            tree_sum([full], out, groups=[[0]], scale=scale, accumulate=accumulate)
            return Work(name)
        most = max(self._exchange.chunk_nbytes // item, 1)
        chunk = min(exchange_chunk(shard_numel, shards, item), most)
        for start in range(0, shard_numel, chunk):
            count = min(chunk, shard_numel - start)
            received = self._received.get(count * shards, full.dtype)
            self._exchange(
                Blocks.of(full, start, count, shard_numel, shards),
                Blocks.of(received, 0, count, count, shards),
            )
            self._exchange.finish()
            blocks = list(received.view(shards, count).unbind())
            blocks[me] = full[me * shard_numel + start :][:count]
            tree_sum(
                blocks,
                out[start : start + count],
                groups=self._groups,
                scale=scale,
                accumulate=accumulate,
                node_dtype=self.node_dtype,
            )
        return Work(name)

    def close(self) -> None:
        """Free datatypes and the exchange buffer. Collective."""
        self._gather.free()
        self._exchange.free()
        self._received.release()
        super().close()
