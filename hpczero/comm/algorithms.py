"""Algorithms: how the ranks of one communicator move equal blocks.

All algorithms move bytes and do nothing else, so results do not depend on which of them is chosen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator
from hpczero.memory.buffers import Scratch
from hpczero.plan.footprint import IN_FLIGHT, step_peers

# Below the 32-bit counts of MPI 3 with room to spare; also what an MPI library pipelines well.
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Blocks:
    """``count`` blocks of ``nbytes`` bytes each; block i begins ``start + i * stride`` bytes into ``tensor``."""

    tensor: Tensor
    start: int
    nbytes: int
    stride: int
    count: int

    @classmethod
    def of(cls, tensor: Tensor, start: int, numel: int, stride: int, count: int) -> Blocks:
        """Blocks by numbers of elements of ``tensor`` instead of bytes."""
        item = tensor.element_size()
        return cls(tensor, start * item, numel * item, stride * item, count)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Address, bytes, stride and number: blocks of equal places are the same memory."""
        address = self.tensor.data_ptr() + self.start
        return address, self.nbytes, self.stride, self.count

    def block(self, index: int) -> MPI.buffer:
        """Memory of one block, for MPI."""
        return MPI.buffer.fromaddress(
            self.tensor.data_ptr() + self.start + index * self.stride, self.nbytes
        )

    def view(self, index: int) -> Tensor:
        """(nbytes,) uint8 of one block; no copy."""
        start = self.start + index * self.stride
        return self.tensor.view(torch.uint8)[start : start + self.nbytes]

    def views(self, first: int, count: int) -> Tensor:
        """(count * nbytes,) uint8 of neighbouring blocks that lie without gaps; no copy."""
        start = self.start + first * self.stride
        return self.tensor.view(torch.uint8)[start : start + count * self.stride]

    def from_block(self, index: int) -> MPI.buffer:
        """Memory from one block to the end of the tensor, for a datatype that strides."""
        offset = self.start + index * self.stride
        size = self.tensor.numel() * self.tensor.element_size()
        return MPI.buffer.fromaddress(self.tensor.data_ptr() + offset, size - offset)

    def pieces(self, most_nbytes: int) -> Iterator[Blocks]:
        """The same blocks in pieces of at most ``most_nbytes``. Each item has one piece of every block."""
        for offset in range(0, self.nbytes, most_nbytes):
            nbytes = min(most_nbytes, self.nbytes - offset)
            yield Blocks(self.tensor, self.start + offset, nbytes, self.stride, self.count)


# How long a rank polls before it naps between polls, and how long a nap is: where ranks outnumber cores, the one that
# polls keeps the core from the one it waits for.
POLL_S = 100e-6
NAP_S = 50e-6


# Fills blocks ``first .. first + count - 1``, given ``first`` and ``count``.
Prepare = Callable[[int, int], None]
Meanwhile = Callable[[], None]


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Return when all requests are complete."""
    patient_from = time.perf_counter() + POLL_S
    while not MPI.Request.Testall(requests):
        if time.perf_counter() > patient_from:
            time.sleep(NAP_S)


def _nothing(first: int, count: int) -> None:
    return


class _Algorithm:
    """One algorithm on one communicator, which it borrows. ``free`` frees what the algorithm made.

    Attributes:
        messages: that this rank has sent; 0 where the MPI library decides.
        accelerator: whose memory the blocks are, where MPI takes addresses of device memory; None for the host.
    """

    name: ClassVar[str]
    in_rounds: ClassVar[bool] = False  # whether it pays to cut blocks into short rounds
    accelerator: Accelerator | None = None

    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        """Not collective. ``comm`` must outlive the algorithm, and carries nothing else while the algorithm runs.

        A single MPI call moves at most ``chunk_nbytes`` of one block.
        """
        self.comm = comm
        self.chunk_nbytes = chunk_nbytes
        self.messages = 0
        # By bytes and extent, committed: MPI frees none by itself.
        self._types: dict[tuple[int, int], MPI.Datatype] = {}

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the algorithm works on ``size`` ranks."""
        return size >= 1

    def type_of(self, nbytes: int, extent: int) -> MPI.Datatype:
        """A datatype of ``nbytes`` bytes that repeats every ``extent`` bytes."""
        if (nbytes, extent) not in self._types:
            block = MPI.BYTE.Create_contiguous(nbytes)
            self._types[nbytes, extent] = block.Create_resized(0, extent).Commit()
            block.Free()
        return self._types[nbytes, extent]

    def free(self) -> None:
        """Free datatypes. Not collective."""
        for block in self._types.values():
            block.Free()
        self._types.clear()


class Gather(_Algorithm, ABC):
    """All-gather of equal blocks, in place."""

    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        """Fill every block from its owner: rank i owns block i. Collective over the communicator.

        At most ``round_nbytes`` of a block, and at most ``chunk_nbytes``, travel in one round.
        """
        if blocks.count > 1:
            if self.accelerator is not None:
                self.accelerator.finish()
            for piece in blocks.pieces(min(self.chunk_nbytes, round_nbytes)):
                self._gather(piece)
            self._finish()

    def _finish(self) -> None:
        """Return when every piece has arrived. Algorithms override it if pieces may still be on their way."""
        return

    @abstractmethod
    def _gather(self, blocks: Blocks) -> None: ...


class Exchange(_Algorithm, ABC):
    """All-to-all of equal blocks. Calls may overlap: each call completes the one before, ``finish`` the last one."""

    in_rounds = True
    takes_gaps: ClassVar[bool] = False  # blocks to send may lie apart, at no cost

    def __call__(
        self,
        send: Blocks,
        receive: Blocks,
        *,
        prepare: Prepare = _nothing,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Send block i of ``send`` to rank i; what rank i sends arrives in block i of ``receive``.

        Collective over the communicator. This rank's own block of ``receive`` has no defined content; read it from
        ``send``.

        Args:
            send: one block for each rank, none longer than ``chunk_nbytes``.
            receive: as many blocks, no overlap with ``send``.
            prepare: fills neighbouring blocks of ``send`` shortly before they leave. Every block is filled once, this
                rank's own included.
            meanwhile: called once, when the call before is complete and messages of this one are on their way.
        """
        # It is waited for once, and the round before travels meanwhile.
        if self.accelerator is not None:
            prepare(0, send.count)
            self.accelerator.finish()  # what was read from ``receive`` before has then been read as well
            prepare = _nothing
        self._exchange(send, receive, prepare, meanwhile)

    def finish(self) -> None:
        """Return when the last call is complete. Collective over the communicator."""
        return

    @abstractmethod
    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None: ...


# Standing requests: messages that recur with the same memory and peers are described to MPI once.
#
# A message costs a fraction of a microsecond to start again, and all messages of a step are started by one call
# (docs/scale.md). Memory that was given back and taken again at the same address is the same memory to MPI.
#
# [Note: Which requests stand]
# A call whose memory is taken anew each time, as at stage 3, may come from another address each time. Its requests
# would never be started again, and MPI would hold them for good. So a call stands from the second time on that it is
# seen, and requests are few. Where there are too many, a call takes the place only of calls that were not seen for
# longer than twice the time after which it came again. So a step with more calls than there is room for keeps some of
# them; if the oldest had to go, each would be dropped just before it comes again.

# Requests that stand at a time: about 1 KiB each in the MPI library and Python.
MOST_REQUESTS = 2**13
# Calls that are remembered because they may come again: about 100 bytes each.
MOST_SEEN = 2**14


@dataclass(slots=True)
class MessageStep:
    """Messages that start together, by persistent ``requests``. Requests that do not stand are freed when complete."""

    requests: list[MPI.Prequest]
    stands: bool

    def free(self) -> None:
        """Free the requests. MPI lets those that are under way end first."""
        for request in self.requests:
            request.Free()


class Standing:
    """Requests of recurring calls, step by step; see [Note: Which requests stand]."""

    def __init__(self, *, most: int = MOST_REQUESTS, most_seen: int = MOST_SEEN) -> None:
        """Not collective. Keeps ``most`` requests, and remembers ``most_seen`` calls whose requests are not kept."""
        self._most = most
        self._most_seen = most_seen
        self._kept: dict[Hashable, list[MessageStep]] = {}  # the latest is last
        self._used: dict[Hashable, int] = {}  # of those that are kept: by number of the call
        self._seen: dict[int, int] = {}  # of others: hash of the key, number of the call
        self._calls = 0
        self._requests = 0

    def get(self, key: Hashable) -> list[MessageStep] | None:
        """Requests of the call ``key``; None if they are not there. Once for each call."""
        self._calls += 1
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
            self._used[key] = self._calls
        return found

    def displaced(self, key: Hashable, requests: int) -> list[Hashable] | None:
        """Calls whose requests ``keep`` must free for the ``requests`` of a call that ``get`` has not found.

        None if the requests of this call are not to be kept.
        """
        before = self._seen.pop(hash(key), None)
        if before is None or requests > self._most:
            self._seen[hash(key)] = self._calls
            if len(self._seen) > self._most_seen:
                del self._seen[next(iter(self._seen))]
            return None
        recent = self._calls - 2 * (self._calls - before)
        excess = self._requests + requests - self._most
        gone: list[Hashable] = []
        for other, steps in self._kept.items():
            if excess <= 0:
                break
            if self._used[other] >= recent:
                self._seen[hash(key)] = self._calls
                return None
            gone.append(other)
            excess -= sum(len(step.requests) for step in steps)
        return gone

    def keep(self, key: Hashable, steps: list[MessageStep], gone: list[Hashable]) -> None:
        """Keep the requests of one more call, and free those of ``gone``, which must be complete."""
        for other in gone:
            self._drop(other)
        self._kept[key] = steps
        self._used[key] = self._calls
        self._requests += sum(len(step.requests) for step in steps)

    def _drop(self, key: Hashable) -> None:
        del self._used[key]
        for step in self._kept.pop(key):
            self._requests -= len(step.requests)
            step.free()

    def free(self) -> None:
        """Free all. Not collective; MPI lets those that are under way end first."""
        for key in list(self._kept):
            self._drop(key)
        self._seen.clear()


# Pairs: in step d every rank sends to the rank d ahead and receives from the rank d behind.
#
# Few ranks go one at a time, because messages to several ranks at once share a link badly: between four emulated hosts
# all at once took 1.6 times as long (Open MPI 4.1.4). The next step is prepared and given to MPI before this one is
# complete. The link then never waits for a rank that has not yet noticed that its step is over. With short rounds this
# comes within a few per cent of the bound of a NIC.
#
# Many ranks go in STEPS steps, several neighbours in each. A step costs the host the same few calls whatever its number
# of messages.


def steps(size: int) -> Iterator[range]:
    """Distances to the peers of each step, nearest first."""
    each = step_peers(size)
    for first in range(1, size, each):
        yield range(first, min(first + each, size))


class _Steps:
    """Steps that are under way, oldest first, and the requests of all calls."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._under_way: deque[MessageStep] = deque()
        self._standing = Standing()

    def of(self, send: Blocks, receive: Blocks, *, own: bool) -> list[MessageStep]:
        """Requests of one round. Peer i gets block i of ``send``, or with ``own`` the block of this rank."""
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
    ) -> MessageStep:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        requests: list[MPI.Prequest] = []
        outgoing = send.block(rank) if own else None
        for distance in distances:
            target, source = (rank + distance) % size, (rank - distance) % size
            leaves = outgoing or send.block(target)
            requests.append(comm.Recv_init([receive.block(source), MPI.BYTE], source))
            requests.append(comm.Send_init([leaves, MPI.BYTE], target))
        return MessageStep(requests, stands)

    def start(self, step: MessageStep) -> None:
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


class _Pairs(_Algorithm):
    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, chunk_nbytes=chunk_nbytes)
        self._steps = _Steps(comm)

    @override
    def free(self) -> None:
        self._steps.free()
        super().free()


class PairwiseGather(_Pairs, Gather):
    """Every rank sends its own block to every other one."""

    name = "pairwise"
    in_rounds = True

    def _gather(self, blocks: Blocks) -> None:
        for step in self._steps.of(blocks, blocks, own=True):
            self._steps.start(step)
        self.messages += blocks.count - 1

    def _finish(self) -> None:
        self._steps.wait(left=0)


class PairwiseExchange(_Pairs, Exchange):
    """Step by step. Each is prepared and given to MPI while the one before travels."""

    name = "pairwise"
    takes_gaps = True

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


# The ring: every rank passes on to its right what it got from its left.
#
# There are n - 1 steps of one block each. Every link of the ring carries every block but one, so the bound of a NIC is
# reached for any number of ranks. The price is n - 1 latencies.


class RingGather(Gather):
    """Neighbours are those in communicator order. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sec. 4.1."""

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


# Recursive doubling, the farthest partner first.
#
# There are log2(n) steps; what is exchanged doubles from step to step. Ranks that are near in communicator order meet
# last, when there is most to exchange. With nodes filled one after the other the large messages therefore stay inside
# the node.


class DoublingGather(Gather):
    """All-gather of a power of two ranks.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sec. 4.1; distances reversed.
    """

    name = "doubling"

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the algorithm works on ``size`` ranks."""
        return size >= 1 and size & (size - 1) == 0

    def _gather(self, blocks: Blocks) -> None:
        # With distance d left to bridge, a rank holds every block that is congruent to it modulo 2d.
        rank, size = self.comm.rank, self.comm.size
        distance = size // 2
        while distance >= 1:
            partner, period = rank ^ distance, 2 * distance
            held = self.type_of(blocks.nbytes, blocks.stride * period)
            self.comm.Sendrecv(
                [blocks.from_block(rank % period), size // period, held],
                partner,
                recvbuf=[blocks.from_block(partner % period), size // period, held],
                source=partner,
            )
            distance //= 2
            self.messages += 1


class LibraryGather(Gather):
    """MPI_Allgather in place."""

    name = "library"

    def _gather(self, blocks: Blocks) -> None:
        block = self.type_of(blocks.nbytes, blocks.stride)
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
            [send.from_block(0), 1, self.type_of(send.nbytes, send.stride)],
            [receive.from_block(0), 1, self.type_of(receive.nbytes, receive.stride)],
        )


class BlockMessages:
    """Equal parts of one buffer, one for each rank of a communicator, gathered and exchanged by messages."""

    def __init__(self, gather: Gather, exchange: Exchange, received: Scratch) -> None:
        """Not collective. All three are owned; ``gather`` and ``exchange`` have the same communicator."""
        self.comm = gather.comm
        self.gather, self.exchange = gather, exchange
        self._received = received

    def spread(self, full: Tensor) -> None:
        """Give every rank all parts of ``full``, in place. Collective."""
        size = self.comm.size
        if size > 1:
            part = full.numel() // size
            self.gather(Blocks.of(full, 0, part, part, size))

    def parts(self, full: Tensor, start: int, count: int) -> list[Tensor]:
        """Every rank's elements ``start .. start + count - 1`` of ``full``, which lie in this rank's part.

        Collective: each rank asks for as many elements of its own part. The result is valid until the next call.
        """
        size, me = self.comm.size, self.comm.rank
        if size == 1:
            return [full[start : start + count]]
        part = full.numel() // size
        received = self._received.get(size * count, full.dtype)
        self.exchange(
            Blocks.of(full, start - me * part, count, part, size),
            Blocks.of(received, 0, count, count, size),
        )
        self.exchange.finish()
        rows = list(received.view(size, count).unbind())
        rows[me] = full[start : start + count]
        return rows

    def free(self) -> None:
        """Free datatypes and the memory to receive into. Not collective."""
        self.gather.free()
        self.exchange.free()
        self._received.release()


GATHERS: tuple[type[Gather], ...] = (LibraryGather, RingGather, DoublingGather, PairwiseGather)
EXCHANGES: tuple[type[Exchange], ...] = (LibraryExchange, PairwiseExchange)
