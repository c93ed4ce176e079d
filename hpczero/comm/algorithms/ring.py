"""The ring: every rank passes on to its right what it got from its left.

Owns: the ring's order. Must not know: see package.

There are n - 1 steps of one block each. Every link of the ring carries every block but one, so the bound of a NIC is
reached for any number of ranks. The price is n - 1 latencies.
"""

from __future__ import annotations

from mpi4py import MPI

from hpczero.comm.algorithms.base import Gather, wait_all
from hpczero.comm.algorithms.blocks import Blocks


class RingGather(Gather):
    """Neighbours are those in communicator order.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sec. 4.1.
    """

    name = "ring"

    def _gather(self, blocks: Blocks) -> None:
        rank, size = self.comm.rank, self.comm.size
        right, left = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            outgoing, incoming = (rank - step) % size, (rank - step - 1) % size
            wait_all(
                [
                    self.comm.Irecv([blocks.block(incoming), MPI.BYTE], left),
                    self.comm.Isend([blocks.block(outgoing), MPI.BYTE], right),
                ]
            )
        self.messages += size - 1
