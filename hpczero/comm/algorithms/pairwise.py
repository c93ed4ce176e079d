"""Pairs: in step d every rank sends to the rank d ahead and receives from the rank d behind.

Owns: the order of pairs. Must not know: see package.

Few ranks go one at a time, because messages to several ranks at once share a link badly: between four emulated hosts
all at once took 1.6 times as long (Open MPI 4.1.4). The next step is prepared and given to MPI before this one is
complete. The link then never waits for a rank that has not yet noticed that its step is over. With short rounds this
comes within a few per cent of the bound of a NIC.

Many ranks go in STEPS steps, several neighbours in each. A step costs the host the same few calls whatever its number
of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mpi4py import MPI
from typing_extensions import override

from hpczero.comm.algorithms.base import Exchange, Gather, Meanwhile, Prepare, wait_all
from hpczero.comm.algorithms.blocks import CHUNK_BYTES, Blocks
from hpczero.comm.algorithms.standing import Standing, Step
from hpczero.plan.rounds import IN_FLIGHT, step_peers


def steps(size: int) -> Iterator[range]:
    """Distances to the peers of each step, nearest first."""
    each = step_peers(size)
    for first in range(1, size, each):
        yield range(first, min(first + each, size))


class _Steps:
    """Steps that are under way, oldest first, and the requests of all calls."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._under_way: deque[Step] = deque()
        self._standing = Standing()

    def of(self, send: Blocks, receive: Blocks, *, own: bool) -> list[Step]:
        """Requests of one round.

        Args:
            send: what leaves.
            receive: where what comes from rank i arrives, in block i.
            own: every peer gets this rank's block; False: peer i gets block i.
        """
        key = (send.place, receive.place, own)
        found = self._standing.get(key)
        if found is None:
            gone = self._standing.displaced(key, 2 * (self._comm.size - 1))
            stands = gone is not None
            found = [
                self._step(send, receive, own, each, stands) for each in steps(self._comm.size)
            ]
            if gone is not None:
                if gone:
                    self.wait(left=0)
                self._standing.keep(key, found, gone)
        return found

    def _step(
        self, send: Blocks, receive: Blocks, own: bool, distances: range, stands: bool
    ) -> Step:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        requests: list[MPI.Prequest] = []
        outgoing = send.block(rank) if own else None
        for distance in distances:
            target, source = (rank + distance) % size, (rank - distance) % size
            leaves = outgoing or send.block(target)
            requests.append(comm.Recv_init([receive.block(source), MPI.BYTE], source))
            requests.append(comm.Send_init([leaves, MPI.BYTE], target))
        return Step(requests, stands)

    def start(self, step: Step) -> None:
        """Begin one more, and let the oldest end before if enough are under way."""
        self.wait(left=IN_FLIGHT - 1)
        if any(step is other for other in self._under_way):  # the same memory again
            self.wait(left=0)
        MPI.Prequest.Startall(step.requests)
        self._under_way.append(step)

    def wait(self, left: int) -> None:
        """Return when at most ``left`` are under way."""
        while len(self._under_way) > left:
            step = self._under_way.popleft()
            wait_all(step.requests)
            if not step.stands:
                step.free()

    def free(self) -> None:
        """Free the requests. Not collective."""
        for step in self._under_way:
            if not step.stands:
                step.free()
        self._under_way.clear()
        self._standing.free()


class PairwiseGather(Gather):
    """Every rank sends its own block to every other one."""

    name = "pairwise"
    in_rounds = True

    @override
    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps = _Steps(comm)

    def _gather(self, blocks: Blocks) -> None:
        for step in self._steps.of(blocks, blocks, own=True):
            self._steps.start(step)
        self.messages += blocks.count - 1

    def _finish(self) -> None:
        self._steps.wait(left=0)

    @override
    def free(self) -> None:
        self._steps.free()
        super().free()


class PairwiseExchange(Exchange):
    """Step by step. Each is prepared and given to MPI while the one before travels."""

    name = "pairwise"
    takes_gaps = True

    @override
    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps = _Steps(comm)

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        rank, size = self.comm.rank, self.comm.size
        requests = self._steps.of(send, receive, own=False)
        for number, (distances, step) in enumerate(zip(steps(size), requests, strict=True)):
            first, after = rank + distances.start, rank + distances.stop
            if first < size:
                prepare(first, min(after, size) - first)
            if after > size:
                prepare(max(first - size, 0), after - size - max(first - size, 0))
            self._steps.start(step)
            if not number:
                self._steps.wait(left=1)  # the call before is complete
                meanwhile()
        prepare(rank, 1)
        if size == 1:
            meanwhile()
        self.messages += size - 1

    @override
    def finish(self) -> None:
        self._steps.wait(left=0)

    @override
    def free(self) -> None:
        self._steps.free()
        super().free()
