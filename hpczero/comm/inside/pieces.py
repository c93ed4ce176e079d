"""The node level by messages where nodes have different numbers of ranks: parts are pieces that lie apart.

Owns: the messages between the ranks of one node. Must not know: other nodes' messages, the order of sums, units.

A rank's part of a buffer is its own shard and what it carries for the other nodes (``plan.carriers``). Ranks of a node
ask for elements anywhere, each for others, so each tells the others first what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.devices.access import Reach
from hpczero.comm.devices.line import Line
from hpczero.comm.inside.level import NodeLevel, Parts
from hpczero.memory.buffers import Memory, Scratch
from hpczero.plan.footprint import Carriers
from hpczero.plan.rounds import EXCHANGE_BYTES


class Pieces(NodeLevel):
    """Private buffers and MPI messages, on nodes with different numbers of ranks."""

    title = "messages"
    most_nbytes = EXCHANGE_BYTES
    reads_peers = False

    def __init__(
        self,
        node: MPI.Intracomm,
        memory: Memory,
        *,
        carriers: Carriers,
        chunk_nbytes: int,
        reach: Reach,
    ) -> None:
        """Not collective.

        Args:
            node: ranks of the node; borrowed.
            memory: ledger of buffers.
            carriers: who carries what, as this rank sees it.
            chunk_nbytes: most bytes that a single MPI call moves.
            reach: where the buffers are.
        """
        super().__init__(node, memory, device=reach.accelerator.device)
        self._carriers = carriers
        self._chunk_nbytes = chunk_nbytes
        self._line = Line(node, reach)
        self._received = Scratch(memory, category="exchange", device=self.device)

    def _brought(self, local: int, shard_numel: int) -> list[tuple[int, int]]:
        """(first element, number) of what a rank of this node has of a gathered buffer before its peers have it."""
        carriers = self._carriers
        found = [(carriers.nodes[carriers.node][local] * shard_numel, shard_numel)]
        for far in range(len(carriers.nodes)):
            if far != carriers.node:
                for piece in carriers.carried(local, far, shard_numel):
                    found.append((piece.rank * shard_numel + piece.start, piece.numel))
        return found

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        size, me, item = self.comm.size, self.comm.rank, full.element_size()
        shard_numel, flat = full.numel() // self._carriers.shards, full.view(torch.uint8)
        for distance in range(1, size):
            target, source = (me + distance) % size, (me - distance) % size
            for move, local, peer in (
                (self._line.send, me, target),
                (self._line.receive, source, source),
            ):
                for first, numel in self._brought(local, shard_numel):
                    brought = flat[first * item : (first + numel) * item]
                    for piece in torch.split(brought, self._chunk_nbytes):
                        if len(piece):
                            move(piece, peer)
            self._line.step()
        self._line.wait()
        return None

    @contextmanager
    @override
    def reading(self, full: Tensor) -> Iterator[Parts]:
        size, me = self.comm.size, self.comm.rank

        def parts(start: int, count: int) -> list[Tensor]:
            if size == 1:
                return [full[start : start + count]]
            asked = np.empty((size, 2), dtype=np.int64)
            self.comm.Allgather(np.array([start, count], dtype=np.int64), asked)
            rows = list(self._received.get((size - 1) * count, full.dtype).view(size - 1, count))
            rows.insert(me, full[start : start + count])
            for distance in range(1, size):
                target, source = (me + distance) % size, (me - distance) % size
                begin, numel = map(int, asked[target])
                if numel:
                    self._line.send(full[begin : begin + numel], target)
                if count:
                    self._line.receive(rows[source], source)
                self._line.step()
            self._line.wait()
            return rows

        yield parts

    @override
    def close(self) -> None:
        """Give the memory to receive into back. Not collective."""
        self._received.release()
