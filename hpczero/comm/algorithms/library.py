"""The MPI library's own collective, whatever it does inside.

Owns: nothing but the call. Must not know: see package.
"""

from __future__ import annotations

from mpi4py import MPI

from hpczero.comm.algorithms.base import Exchange, Gather, Meanwhile, Prepare
from hpczero.comm.algorithms.blocks import Blocks


class LibraryGather(Gather):
    """MPI_Allgather in place."""

    name = "library"

    def _gather(self, blocks: Blocks) -> None:
        block = self.types.get(blocks.nbytes, blocks.stride)
        self.comm.Allgather(MPI.IN_PLACE, [blocks.from_block(0), 1, block])


class LibraryExchange(Exchange):
    """MPI_Alltoall."""

    name = "library"

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        meanwhile()
        prepare(0, send.count)
        self.comm.Alltoall(
            [send.from_block(0), 1, self.types.get(send.nbytes, send.stride)],
            [receive.from_block(0), 1, self.types.get(receive.nbytes, receive.stride)],
        )
