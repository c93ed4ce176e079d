"""How MPI gets at device memory: not at all, by its address, or through pinned memory of the host.

Before MPI is called the device is waited for (accelerator/base.py: [Note: Two clocks]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator, Lane, Mark
from hpczero.comm.algorithms import (
    CHUNK_BYTES,
    Blocks,
    Exchange,
    Gather,
    Meanwhile,
    Prepare,
    wait_all,
)
from hpczero.plan.footprint import IN_FLIGHT, gather_round

# Device memory through pinned memory of the host, for an MPI that cannot see it.
#
#     gather     down k+1 | messages k | up k-1        a few slots in turn, so that all three go on at once
#     exchange   prepare, down, send: block by block; up when the inner algorithm says that the call before is complete
#
# Source: the ring of slots is that of every staging MPI (docs/decisions/0013-accelerators.md).

SLOTS = 3
SLOT_NBYTES = 16 * 2**20  # of all blocks together
LEAST_NBYTES = 64 * 2**10  # of one block: below that a copy costs its start, not its bytes


class StagedGather(Gather):
    """Another gather, which it owns, on the host's copy of each piece."""

    def __init__(self, inner: Gather, accelerator: Accelerator) -> None:
        """Not collective. ``inner`` moves bytes of the host; the blocks are memory of ``accelerator``."""
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = f"{inner.name}, staged"  # type: ignore[misc]  # of this one object
        self._inner = inner
        self._accelerator = accelerator
        self._down, self._up = accelerator.lane(), accelerator.lane()
        self._slots = _PinnedSlots(accelerator, SLOTS)

    @override
    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        if blocks.count <= 1 or not blocks.nbytes:
            return
        me, count = self.comm.rank, blocks.count
        begin = self._accelerator.mark()  # what was written to or read from the blocks before
        self._down.after(begin)
        self._up.after(begin)
        # The slots are the host's: they set the rounds, not what would suit the device.
        wished = max(SLOT_NBYTES // count, LEAST_NBYTES)
        most = min(gather_round(blocks.nbytes, count, wished), self.chunk_nbytes)
        pieces = list(blocks.pieces(most))
        hosts = [self._slots.blocks(turn % SLOTS, piece) for turn, piece in enumerate(pieces)]
        down: list[Mark] = []

        def start_down(turn: int) -> None:
            self._slots.wait(turn % SLOTS)
            self._down.copy(hosts[turn].view(me), pieces[turn].view(me))
            down.append(self._down.mark())

        start_down(0)
        for turn, (piece, host) in enumerate(zip(pieces, hosts, strict=True)):
            if turn + 1 < len(pieces):
                start_down(turn + 1)
            down[turn].wait()
            self._inner(host)
            _copy(self._up, piece, host, 0, me)
            _copy(self._up, piece, host, me + 1, count - me - 1)
            self._slots.in_use(turn % SLOTS, self._up.mark())
        self._up.finish()
        self.messages = self._inner.messages

    def _gather(self, blocks: Blocks) -> None:
        raise AssertionError("the inner one does it")

    @override
    def free(self) -> None:
        self._inner.free()
        self._slots.free()


class StagedExchange(Exchange):
    """Another exchange, on the host's copy of each block."""

    def __init__(self, inner: Exchange, accelerator: Accelerator) -> None:
        """Not collective; arguments as ``StagedGather``."""
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = f"{inner.name}, staged"  # type: ignore[misc]  # of this one object
        self._inner = inner
        self._accelerator = accelerator
        self._down, self._up = accelerator.lane(), accelerator.lane()
        # Of two calls in turn: the one before is not complete when the next begins.
        self._sent, self._received = _PinnedSlots(accelerator, 2), _PinnedSlots(accelerator, 2)
        self._turn = 0
        self._complete: Callable[[], None] = lambda: None

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        me, size, slot = self.comm.rank, self.comm.size, self._turn % 2
        self._turn += 1
        sent, received = self._sent.blocks(slot, send), self._received.blocks(slot, receive)
        earlier, begin = self._complete, self._accelerator.mark()

        def prepared(first: int, count: int) -> None:
            prepare(first, count)
            if (first, count) != (me, 1):
                self._down.after(self._accelerator.mark())
                _copy(self._down, sent, send, first, count)
                self._down.finish()

        def complete() -> None:
            self._up.after(begin)  # whoever read ``receive`` before has done so
            _copy(self._up, receive, received, 0, me)
            _copy(self._up, receive, received, me + 1, size - me - 1)
            self._up.finish()

        def then() -> None:
            earlier()
            meanwhile()

        self._inner(sent, received, prepare=prepared, meanwhile=then)
        self.messages = self._inner.messages
        self._complete = complete

    @override
    def finish(self) -> None:
        self._inner.finish()
        complete, self._complete = self._complete, lambda: None
        complete()

    @override
    def free(self) -> None:
        self._inner.free()
        self._sent.free()
        self._received.free()


def _copy(lane: Lane, into: Blocks, source: Blocks, first: int, count: int) -> None:
    """Copy neighbouring blocks, at once where they lie without gaps on both sides."""
    if count and into.nbytes == into.stride and source.nbytes == source.stride:
        lane.copy(into.views(first, count), source.views(first, count))
        return
    for index in range(first, first + count):
        lane.copy(into.view(index), source.view(index))


class _PinnedSlots:
    """Pinned buffers, each with the mark behind its last reader. They grow to the largest need."""

    def __init__(self, accelerator: Accelerator, count: int) -> None:
        self._accelerator = accelerator
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu")] * count
        self._readers: list[Mark | None] = [None] * count

    def blocks(self, slot: int, like: Blocks) -> Blocks:
        """Blocks of the same number and size, one after the other, in ``slot``."""
        nbytes = like.count * like.nbytes
        if len(self._buffers[slot]) < nbytes:
            self.wait(slot)
            self._buffers[slot] = self._accelerator.pinned(nbytes)
        return Blocks(self._buffers[slot], 0, like.nbytes, like.nbytes, like.count)

    def in_use(self, slot: int, until: Mark) -> None:
        """Say that a lane reads ``slot`` up to a mark."""
        self._readers[slot] = until

    def wait(self, slot: int) -> None:
        """Return when ``slot`` may be written."""
        reader, self._readers[slot] = self._readers[slot], None
        if reader is not None:
            reader.wait()

    def free(self) -> None:
        """Give the memory back. Nothing may be under way."""
        for slot in range(len(self._buffers)):
            self.wait(slot)
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8, device="cpu")


class Reach:
    """Makes algorithms that work on the memory of ``accelerator``."""

    name: str

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        """An algorithm of class ``kind`` on ``comm``. Not collective."""
        gather = kind(comm, chunk_nbytes=chunk_nbytes)
        gather.accelerator = None if self.accelerator.is_host else self.accelerator
        return gather

    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        """An algorithm of class ``kind`` on ``comm``. Not collective."""
        exchange = kind(comm, chunk_nbytes=chunk_nbytes)
        exchange.accelerator = None if self.accelerator.is_host else self.accelerator
        return exchange

    def outgoing(self, data: Tensor) -> Tensor:
        """Memory that MPI may read now, with the bytes of ``data``, a contiguous tensor that nobody writes to."""
        self.accelerator.finish()
        return data

    def incoming(self, data: Tensor) -> Tensor:
        """Memory that MPI may write to now, for the bytes of ``data``, a contiguous tensor; ``landed`` follows."""
        self.accelerator.finish()  # its memory may have been another tensor's, which a kernel still reads
        return data

    def landed(self, data: Tensor, memory: Tensor) -> None:
        """Have in ``data`` what MPI has written to ``memory``, which ``incoming`` gave."""
        return

    def broadcast(self, comm: MPI.Intracomm, blocks: Blocks, root: int) -> None:
        """Give every rank ``root``'s block 0. Collective over ``comm``. It is rare: it goes through the host."""
        for piece in blocks.pieces(CHUNK_BYTES):
            device = piece.view(0)
            host = device.cpu()
            comm.Bcast([MPI.buffer.fromaddress(host.data_ptr(), len(host)), MPI.BYTE], root=root)
            if comm.rank != root and host.data_ptr() != device.data_ptr():
                device.copy_(host)


class HostReach(Reach):
    """The memory is the host's; MPI sees it as it is."""

    name = "host memory"

    def __init__(self) -> None:
        super().__init__(HostAccelerator())


class DirectReach(Reach):
    """This MPI takes addresses of device memory: it is CUDA-aware."""

    name = "device memory given to MPI"


class StagedReach(Reach):
    """This MPI knows the host's memory only. Everything goes through pinned memory, in pieces that overlap."""

    name = "device memory through the host"

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._copies: Lane | None = None

    @override
    def outgoing(self, data: Tensor) -> Tensor:
        memory = self._host_memory(data)
        self._copy(memory, _bytes_of(data))
        return memory

    @override
    def incoming(self, data: Tensor) -> Tensor:
        return self._host_memory(data)

    @override
    def landed(self, data: Tensor, memory: Tensor) -> None:
        self._copy(_bytes_of(data), memory)

    def _host_memory(self, data: Tensor) -> Tensor:
        return self.accelerator.pinned(data.numel() * data.element_size())

    def _copy(self, into: Tensor, source: Tensor) -> None:
        """Wait for the copy: MPI, or whoever gets the memory next, knows nothing of lanes."""
        if self._copies is None:
            self._copies = self.accelerator.lane()
        self._copies.after(self.accelerator.mark())
        self._copies.copy(into, source)
        self._copies.finish()

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return StagedGather(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return StagedExchange(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)


def _bytes_of(data: Tensor) -> Tensor:
    """(nbytes,) uint8 of a contiguous tensor; no copy."""
    return data.view(-1).view(torch.uint8)


class _InFlight(NamedTuple):
    request: MPI.Request
    memory: tuple[Tensor, Tensor]  # stays alive until the message is complete
    landed: Callable[[], None] | None = None


class StepsUnderWay:
    """Steps under way, oldest first, and the number of messages ``sent``, which arrive in order."""

    def __init__(self, comm: MPI.Intracomm, reach: Reach) -> None:
        """Not collective; ``comm`` is borrowed, and carries nothing else meanwhile."""
        self.comm = comm
        self.sent = 0
        self._reach = reach
        self._next: list[_InFlight] = []
        self._under_way: deque[list[_InFlight]] = deque()

    def send(self, data: Tensor, rank: int) -> None:
        """Send a contiguous tensor with the next step. Nobody writes to it before that is complete."""
        memory = self._reach.outgoing(data)
        request = self.comm.Isend([_buffer(memory), MPI.BYTE], rank)
        self._next.append(_InFlight(request, (data, memory)))
        self.sent += 1

    def receive(self, into: Tensor, rank: int) -> None:
        """Receive into a contiguous tensor with the next step. Nobody reads or writes it before that is complete."""
        memory = self._reach.incoming(into)
        request = self.comm.Irecv([_buffer(memory), MPI.BYTE], rank)
        landed = partial(self._reach.landed, into, memory)
        self._next.append(_InFlight(request, (into, memory), landed))

    def step(self) -> None:
        """End the step. Returns when few enough are under way; a step without messages counts as one."""
        self._under_way.append(self._next)
        self._next = []
        self.wait(IN_FLIGHT)

    def wait(self, left: int = 0) -> None:
        """Return when at most ``left`` steps are under way."""
        while len(self._under_way) > left:
            step = self._under_way[0]
            wait_all([message.request for message in step])
            for message in step:
                if message.landed is not None:
                    message.landed()
            self._under_way.popleft()


def _buffer(memory: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())
