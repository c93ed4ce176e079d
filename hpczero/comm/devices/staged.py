"""Device memory through pinned memory of the host, for an MPI that cannot see it.

Owns: the pinned slots, and the order of copies down, messages and copies up. Must not know: which algorithm moves the
host's bytes, units, sums.

    gather     down k+1 | messages k | up k-1        a few slots in turn, so that all three go on at once
    exchange   prepare, down, send: block by block; up when the inner algorithm says that the call before is complete

Source: the ring of slots is that of every staging MPI (docs/decisions/0013-accelerators.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Lane, Mark
from hpczero.comm.algorithms import Exchange, Gather, Meanwhile, Prepare
from hpczero.comm.algorithms.blocks import CHUNK_BYTES, Blocks
from hpczero.plan.rounds import gather_round

SLOTS = 3
SLOT_NBYTES = 16 * 2**20  # of all blocks together
LEAST_NBYTES = 64 * 2**10  # of one block: below that a copy costs its start, not its bytes


class StagedGather(Gather):
    """Another gather, on the host's copy of each piece."""

    def __init__(self, inner: Gather, accelerator: Accelerator) -> None:
        """Not collective.

        Args:
            inner: moves bytes of the host. The staged gather owns it.
            accelerator: the blocks are its memory.
        """
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = f"{inner.name}, staged"  # type: ignore[misc]  # of this one object
        self._inner = inner
        self._accelerator = accelerator
        self._down, self._up = accelerator.lane(), accelerator.lane()
        self._slots = _Slots(accelerator, SLOTS)

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
        self._sent, self._received = _Slots(accelerator, 2), _Slots(accelerator, 2)
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


class _Slots:
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
