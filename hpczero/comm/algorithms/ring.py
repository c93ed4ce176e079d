"""The ring: every rank hands on to its right what it got from its left.

Owns: the ring's order. Must not know: see package. n - 1 steps of one block each; every link of the ring carries every
block but one, so the bound of a NIC is reached whatever the number of ranks, at the price of n - 1 latencies.
"""

from __future__ import annotations

from mpi4py import MPI

from hpczero.comm.algorithms.base import Gather, wait_all
from hpczero.comm.algorithms.blocks import Blocks


class RingGather(Gather):
    """Neighbours in communicator order; source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sec. 4.1."""

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
