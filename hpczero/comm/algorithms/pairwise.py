"""Pairs: in step d everybody sends to the rank d ahead and receives from the rank d behind.

Owns: its order. Must not know: see package. One step at a time: messages to several ranks at once share a link badly
(between four emulated hosts all at once took 1.6 times as long, Open MPI 4.1.4). An exchange prepares the block of the
next step while that of this step travels, and hands it to MPI before this step is complete, so that the link never
waits for a rank that has not noticed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpi4py import MPI

from hpczero.comm.algorithms.base import Exchange, Gather, wait_all
from hpczero.comm.blocks import CHUNK_BYTES, Blocks

IN_FLIGHT = 2  # steps that MPI knows of at a time


class PairwiseGather(Gather):
    """Every rank sends its own block to every other one."""

    name = "pairwise"

    def _gather(self, blocks: Blocks) -> None:
        rank, size = self.comm.rank, self.comm.size
        for distance in range(1, size):
            source = (rank - distance) % size
            wait_all(
                [
                    self.comm.Irecv([blocks.block(source), MPI.BYTE], source),
                    self.comm.Isend([blocks.block(rank), MPI.BYTE], (rank + distance) % size),
                ]
            )


class PairwiseExchange(Exchange):
    """Block by block, each prepared and handed over while the one before travels."""

    name = "pairwise"

    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        """See ``Exchange``."""
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps: deque[list[MPI.Request]] = deque()

    def _exchange(
        self,
        send: Blocks,
        receive: Blocks,
        prepare: Callable[[int], None],
        meanwhile: Callable[[], None],
    ) -> None:
        rank, size = self.comm.rank, self.comm.size
        for distance in range(1, size):
            target, source = (rank + distance) % size, (rank - distance) % size
            prepare(target)
            self._wait(steps_left=IN_FLIGHT - 1)
            self._steps.append(
                [
                    self.comm.Irecv([receive.block(source), MPI.BYTE], source),
                    self.comm.Isend([send.block(target), MPI.BYTE], target),
                ]
            )
            if distance == 1:
                self._wait(steps_left=1)  # the call before is complete
                meanwhile()
        prepare(rank)
        if size == 1:
            meanwhile()

    def finish(self) -> None:
        """See ``Exchange``."""
        self._wait(steps_left=0)

    def _wait(self, steps_left: int) -> None:
        while len(self._steps) > steps_left:
            wait_all(self._steps.popleft())
