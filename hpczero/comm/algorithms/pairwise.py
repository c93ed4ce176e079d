"""Pairs: at distance d everybody sends to the rank d ahead and receives from the rank d behind.

Owns: its order and how many messages are under way. Must not know: see package. Nobody is the target of two ranks at
once. Messages are nonblocking, so that a block can be prepared while the one before is on its way.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from hpczero.comm.algorithms.base import Exchange, Gather
from hpczero.comm.blocks import Blocks

# Distances under way at once: enough to hide a latency, few enough not to flood a receiver on many ranks.
UNDER_WAY = 4


class PairwiseGather(Gather):
    """Every rank sends its own block to every other one."""

    name = "pairwise"

    def _gather(self, blocks: Blocks) -> None:
        rank = self.comm.rank
        _in_pairs(self.comm, lambda _: blocks.block(rank), blocks.block)


class PairwiseExchange(Exchange):
    """Block by block, each prepared while those before it travel."""

    name = "pairwise"

    def _exchange(self, send: Blocks, receive: Blocks, prepare: Callable[[int], None]) -> None:
        def prepared(index: int) -> MPI.buffer:
            prepare(index)
            return send.block(index)

        _in_pairs(
            self.comm,
            prepared,
            receive.block,
            meanwhile=lambda: prepare(self.comm.rank),
        )


def _in_pairs(
    comm: MPI.Intracomm,
    outgoing: Callable[[int], MPI.buffer],
    incoming: Callable[[int], MPI.buffer],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """``outgoing(i)`` to rank i and ``incoming(i)`` from rank i, for all others; ``meanwhile`` once all have left."""
    rank, size = comm.rank, comm.size
    receives = []
    pairs: list[list[MPI.Request]] = []

    def post_receive(distance: int) -> None:
        source = (rank - distance) % size
        receives.append(comm.Irecv([incoming(source), MPI.BYTE], source))

    for distance in range(1, min(size, UNDER_WAY + 1)):
        post_receive(distance)
    for distance in range(1, size):
        target = (rank + distance) % size
        sent = comm.Isend([outgoing(target), MPI.BYTE], target)
        pairs.append([sent, receives[distance - 1]])
        if distance + UNDER_WAY < size:
            MPI.Request.Waitall(pairs.pop(0))
            post_receive(distance + UNDER_WAY)
    meanwhile()
    for pair in pairs:
        MPI.Request.Waitall(pair)
