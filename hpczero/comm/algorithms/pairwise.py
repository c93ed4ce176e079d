"""Pairs: in step d every rank sends to the rank d ahead and receives from the rank d behind.

Owns: the order of pairs. Must not know: see package.

Steps go one at a time, because messages to several ranks at once share a link badly: between four emulated hosts all at
once took 1.6 times as long (Open MPI 4.1.4). The next step is prepared and given to MPI before this one is complete.
The link then never waits for a rank that has not yet noticed that its step is over. With short rounds this comes within
a few per cent of the bound of a NIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpi4py import MPI
from typing_extensions import override

from hpczero.comm.algorithms.base import Exchange, Gather, wait_all
from hpczero.comm.algorithms.blocks import CHUNK_BYTES, Blocks

IN_FLIGHT = 2  # steps that MPI knows of at a time


class _Steps:
    """Steps that are under way, oldest first."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._steps: deque[list[MPI.Request]] = deque()

    def start(self, send: MPI.buffer, target: int, receive: MPI.buffer, source: int) -> None:
        """Begin one more."""
        self._steps.append(
            [
                self._comm.Irecv([receive, MPI.BYTE], source),
                self._comm.Isend([send, MPI.BYTE], target),
            ]
        )

    def wait(self, left: int) -> None:
        """Return when at most ``left`` are under way."""
        while len(self._steps) > left:
            wait_all(self._steps.popleft())


class PairwiseGather(Gather):
    """Every rank sends its own block to every other one."""

    name = "pairwise"
    in_rounds = True

    @override
    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps = _Steps(comm)

    def _gather(self, blocks: Blocks) -> None:
        rank, size = self.comm.rank, self.comm.size
        for distance in range(1, size):
            target, source = (rank + distance) % size, (rank - distance) % size
            self._steps.wait(left=IN_FLIGHT - 1)
            self._steps.start(blocks.block(rank), target, blocks.block(source), source)

    def _finish(self) -> None:
        self._steps.wait(left=0)


class PairwiseExchange(Exchange):
    """Block by block. Each is prepared and given to MPI while the one before travels."""

    name = "pairwise"

    @override
    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps = _Steps(comm)

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
            self._steps.wait(left=IN_FLIGHT - 1)
            self._steps.start(send.block(target), target, receive.block(source), source)
            if distance == 1:
                self._steps.wait(left=1)  # the call before is complete
                meanwhile()
        prepare(rank)
        if size == 1:
            meanwhile()

    @override
    def finish(self) -> None:
        self._steps.wait(left=0)
