"""The node level in shared memory: whole parameters once per node, gradients summed straight out of peers' buffers.

[Note: Who may touch what]
Whole parameters (``Use.GATHER``): a rank writes its own part only, and only when no rank reads it. The order of a
training step sees to that: an update comes after an agreement of all ranks that their backward is over. ``spread`` only
waits for all ranks.

Buffers that are given back between uses: [Note: Where whole parameters lie].

Gradients (``Use.REDUCE``): peers.py, [Note: Who may touch a gradient].
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.comm.inside import NOTHING, PAGE, Counters, NodeLevel, Segment, addresses, map_at
from hpczero.comm.peers import COLUMNS, GATHERED, SharedLevel
from hpczero.errors import CommError
from hpczero.memory.buffers import Buffer, Use
from hpczero.memory.pages import padded

# Slots: shared memory that the buffers of a node take in turn.
#
#     addresses of a buffer    the same for ever, because autograd keeps pointing there
#     range of the file        another one at each take; its pages stay where they are from one buffer to the next
#
# A buffer that is given back and taken again would cost the kernel a cleared page and a fault for every 4 KiB, on every
# rank. A range that another buffer leaves costs one call, which enters all its pages into the table of the process.
#
# [Note: How much is kept]
# A period ends when no buffer is in use: a forward, a backward, a block in which a program looks at all parameters.
# What nobody has is kept as far as this period or the one before has needed it at one time, and from one period to the
# next as far as both have. So nothing that is kept makes the most that was ever held larger, and what was needed once
# goes.

POPULATE = 0x8000  # mman.h: the same on all Linux but Alpha, MIPS and PA-RISC


@dataclass(frozen=True)
class WindowSlot:
    """A range of the file, from byte ``begin`` at a page; ``fresh``: it has no pages yet."""

    begin: int
    fresh: bool


class WindowSlots:
    """Which buffer has which range of ``segment``: ``taken``, by number. One rank of a node keeps this book."""

    def __init__(self, segment: Segment) -> None:
        """``segment`` has room for all buffers at once; not collective."""
        self._segment = segment
        self.taken: dict[int, tuple[WindowSlot, int]] = {}
        self._kept: dict[int, int] = {}  # begin of a range that nobody has: bytes; the oldest first
        self._bare: defaultdict[int, list[int]] = defaultdict(list)  # bytes: begins without pages
        self._end = 0
        self._used = 0
        self._most = self._most_before = 0  # that were in use in this period, and in the one before

    @property
    def held_nbytes(self) -> int:
        """Bytes of all ranges that have pages."""
        return self._used + sum(self._kept.values())

    def take(self, number: int, nbytes: int) -> WindowSlot:
        """The range of buffer ``number``: the one that it has, or one of the same size that nobody has.

        One that it has is as fresh as it was: a rank may hear of the second take first, and has brought no pages then.
        """
        nbytes = padded(nbytes, PAGE)
        if number in self.taken:
            return self.taken[number][0]
        kept = next((begin for begin, size in self._kept.items() if size == nbytes), None)
        self._used += nbytes
        self._most = max(self._most, self._used)
        if kept is not None:
            del self._kept[kept]
            slot = WindowSlot(kept, fresh=False)
        else:
            self._keep(max(self._most, self._most_before))
            slot = WindowSlot(self._new(nbytes), fresh=True)
        self.taken[number] = slot, nbytes
        return slot

    def leave(self, number: int) -> None:
        """No rank of the node reads the buffer any more."""
        slot, nbytes = self.taken.pop(number)
        self._used -= nbytes
        if nbytes:  # a range of no bytes begins where the next one does, and would take its place in the book
            self._kept[slot.begin] = nbytes
        if not self.taken:
            self._keep(min(self._most, self._most_before))
            self._most, self._most_before = 0, self._most

    def _new(self, nbytes: int) -> int:
        if self._bare[nbytes]:
            return self._bare[nbytes].pop()
        begin, self._end = self._end, self._end + nbytes
        return begin

    def _keep(self, most: int) -> None:
        """Give back the oldest pages that nobody has, until no more is held. See [Note: How much is kept]."""
        while self._kept and self.held_nbytes > most:
            begin = next(iter(self._kept))
            nbytes = self._kept.pop(begin)
            self._segment.give_back(begin, begin + nbytes)
            self._bare[nbytes].append(begin)


class Addresses:
    """Addresses of one buffer in this process, behind which there is a range of a file, or nothing.

    ``bytes``, (nbytes,) uint8, are zero where there is nothing, and what is written there then is lost.
    """

    def __init__(self, nbytes: int) -> None:
        """Nothing is there yet."""
        self._nbytes = padded(max(nbytes, 1), PAGE)
        with torch.inference_mode(False):
            whole = addresses(self._nbytes)
            self.bytes = whole[:nbytes]
        self._address = whole.data_ptr()  # of no bytes torch has no address
        self._begin: int | None = None

    def show(self, file: int, slot: WindowSlot) -> None:
        """Put the range of ``file`` behind the addresses, unless it is there. Raises CommError if it cannot."""
        if self._begin != slot.begin:
            # Pages that are not there yet come from the rank whose part they are (inside.py, [Note: Full /dev/shm]).
            self._map(mmap.MAP_SHARED | (0 if slot.fresh else POPULATE), file, slot.begin)
            self._begin = slot.begin

    def hide(self) -> None:
        """Take the range away; whoever still looks sees zeros, not what comes to lie there next."""
        if self._begin is not None:
            self._map(NOTHING, -1, 0)
            self._begin = None

    def _map(self, flags: int, file: int, begin: int) -> None:
        try:
            map_at(self._address, self._nbytes, flags, file, begin)
        except OSError as error:
            raise CommError(
                f"{self._nbytes:,} bytes of shared memory cannot be mapped: {error.strerror}; look at ulimit -v "
                "and sysctl vm.max_map_count, or use transport flat"
            ) from error


# Whole parameters of a node that pass: buffers that are given back between uses, in shared memory.
#
# [Note: Where whole parameters lie]
# Buffers that are given back between uses take slots of one segment in turn. The first rank of the node chooses: only
# it looks who has released what, because two ranks that look may see different things. The others read its choice, and
# wait for it if they are ahead. It never waits for a release: a rank that goes on using a buffer keeps its slot from
# others.

# Columns of each buffer: which use a rank has released, and where the first rank has put it.
RELEASED, PLACE, EACH = 0, 1, 2
GENERATION, FRESH = 33, 1 << 32  # bits of what the first rank tells: generation, fresh, page


class PassingBuffer(Buffer):
    """Whole parameters of a unit that are given back between uses; one copy for the node.

    The ledger counts this rank's part of it while this rank uses it.
    """

    shared = True
    lasts = False

    def __init__(
        self, passing: Passing, number: int, numel: int, dtype: torch.dtype, category: str
    ) -> None:
        """Not collective. Nothing is held yet, so that not all units are held at once."""
        self.addresses = Addresses(numel * dtype.itemsize)
        self.tensor = self.addresses.bytes.view(dtype)
        self.number, self.whole_nbytes = number, numel * dtype.itemsize
        self.generation = 0
        self._passing, self._memory, self._category = passing, passing.level.memory, category
        self._nbytes = -(-self.whole_nbytes // passing.level.comm.size)
        self._held = False

    @override
    def take(self) -> None:
        self.generation += 1
        self._passing.show(self)
        if not self._held:
            self._memory.add(self._category, self._nbytes)
            self._held = True

    @override
    def release(self) -> None:
        """Say that this rank reads it no more. Others may come to lie there when no rank of the node reads it."""
        if self._held:
            self._passing.released(self)
            self._memory.add(self._category, -self._nbytes)
            self._held = False


class Passing:
    """All such buffers of one transport on this rank; methods are not collective unless they say so."""

    def __init__(self, level: Window, first_column: int) -> None:
        """Not collective. The counters of ``level`` have ``columns`` columns for it, from ``first_column`` on."""
        self.level = level
        self._first = first_column
        self._buffers: list[PassingBuffer] = []
        self.segment: Segment | None = None
        self._slots: WindowSlots | None = None  # of the first rank

    @property
    def columns(self) -> int:
        """Of the counters, for all buffers together."""
        return EACH * len(self._buffers)

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str) -> PassingBuffer:
        """As of ``Collectives.allocate``, equal on all ranks; nothing is held until it is taken."""
        buffer = PassingBuffer(self, len(self._buffers), numel, dtype, category)
        self._buffers.append(buffer)
        return buffer

    def open(self) -> None:
        """All buffers have been asked for. Collective over the group. Raises CommError on every rank without memory."""
        if not self._buffers:
            return
        nbytes = sum(padded(buffer.whole_nbytes, PAGE) for buffer in self._buffers)
        with self.level.group.agreed("share memory for parameters"):
            what = f"{nbytes:,} bytes of parameters"
            self.segment = Segment.create(self.level.comm, nbytes, what, mapped=False)
        if self.level.comm.rank == 0:
            self._slots = WindowSlots(self.segment)

    def show(self, buffer: PassingBuffer) -> None:
        """Put memory behind ``buffer``, the same on all ranks of the node. See [Note: Where whole parameters lie].

        Raises CommError if there is none left, on this rank alone: whoever catches it leaves the others waiting.
        """
        assert self.segment is not None, "settled"
        slot = self._slot(buffer)
        buffer.addresses.show(self.segment.file, slot)
        if slot.fresh:
            part = buffer.nbytes
            begin = slot.begin + self.level.comm.rank * part
            self.segment.claim(begin, min(begin + part, slot.begin + buffer.whole_nbytes))

    def _slot(self, buffer: PassingBuffer) -> WindowSlot:
        counters = self.level.counters
        assert counters is not None, "settled"
        column = self._column(buffer.number, PLACE)
        if self._slots is not None:
            self._sweep()
            slot = self._slots.take(buffer.number, buffer.whole_nbytes)
            told = buffer.generation << GENERATION | FRESH * slot.fresh | slot.begin // PAGE
            counters.publish(column, told)
            return slot
        least = buffer.generation << GENERATION
        self.level.wait_until(
            lambda: counters.has(0, column, least),
            "waiting for the first rank of the node to unshard",
        )
        told = counters.read(0, column)
        return WindowSlot((told & (FRESH - 1)) * PAGE, fresh=bool(told & FRESH))

    def released(self, buffer: PassingBuffer) -> None:
        """This rank has no more use for the content of ``buffer``."""
        buffer.addresses.hide()
        if self.level.counters is not None:
            self.level.counters.publish(self._column(buffer.number, RELEASED), buffer.generation)
            self._sweep()

    def _sweep(self) -> None:
        """Free what every rank of the node has released by now; on the first rank. Not collective."""
        counters = self.level.counters
        if self._slots is None or counters is None:
            return
        for number in list(self._slots.taken):
            generation = self._buffers[number].generation
            if counters.reached(self._column(number, RELEASED), generation):
                self._slots.leave(number)

    def _column(self, number: int, which: int) -> int:
        return self._first + EACH * number + which


class WholeBuffer(Buffer):
    """Whole parameters of a unit that last, one copy for the node. The ledger counts this rank's part of it."""

    shared = lasts = True

    def __init__(
        self, segment: Segment, level: Window, numel: int, dtype: torch.dtype, category: str
    ) -> None:
        """Not collective. Gets the pages of this rank's part. Raises CommError if there are none left."""
        self.tensor = segment.bytes[: numel * dtype.itemsize].view(dtype)
        self._address = self.tensor.data_ptr()
        whole = numel * dtype.itemsize
        self._nbytes = -(-whole // level.comm.size)
        begin = level.comm.rank * self._nbytes
        segment.claim(begin, min(begin + self._nbytes, whole))
        segment.close_file()  # a model may have more units than a process may have files
        level.memory.add(category, self._nbytes)
        self._held = True

    @property
    @override
    def moved(self) -> bool:
        """Whether torch has moved it to memory that the node does not see, as ``share_memory_`` does."""
        return self.tensor.data_ptr() != self._address

    @override
    def take(self) -> None:
        """It is there."""

    @override
    def release(self) -> None:
        """It stays."""


class Window(SharedLevel):
    """Ranks of one node over shared memory. What is not allocated here moves by messages."""

    title = "shared memory"

    def __init__(
        self,
        transport: Collectives,
        messages: NodeLevel,
        *,
        overlap: bool = False,
        shares_wholes: bool = True,
    ) -> None:
        """Not collective. Arguments as of ``SharedLevel``.

        ``shares_wholes`` says whether a node has one copy of whole parameters. False gives each rank its own, in memory
        that is gone while they are sharded, as between nodes. A program that reads them then fails on one node too.
        """
        super().__init__(transport, messages, overlap=overlap)
        self.shares_wholes = shares_wholes
        self._passing = Passing(self, first_column=COLUMNS)
        self._shared: set[int] = set()  # addresses of whole parameters that the node sees

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        """A buffer as of ``Collectives.allocate``. Collective over the group if the memory is shared."""
        if use is Use.GATHER and self.shares_wholes:
            return self._allocate_whole(numel, dtype, category, keep)
        return super().allocate(numel, dtype, category=category, use=use, keep=keep)

    def _allocate_whole(self, numel: int, dtype: torch.dtype, category: str, keep: bool) -> Buffer:
        whole: Buffer
        if keep:
            nbytes = numel * dtype.itemsize
            with self.group.agreed("share memory for parameters"):
                segment = Segment.create(self.comm, nbytes, f"{nbytes:,} bytes of parameters")
            with self.group.agreed("claim shared memory for parameters"):
                whole = WholeBuffer(segment, self, numel, dtype, category)
        else:
            whole = self._passing.allocate(numel, dtype, category=category)
        self._shared.add(whole.tensor.data_ptr())
        return whole

    @override
    def settle(self) -> None:
        """Lay the gradients out in shared memory. Collective over the group."""
        columns = COLUMNS + self._passing.columns
        self.counters = Counters(self.comm, columns, naps=self._overlap)
        self._passing.open()
        each, size = self._gradients.lay_out(), self.comm.size
        with self.group.agreed("share memory for gradients"):
            segment = Segment.create(self.comm, each * size, f"{each * size:,} bytes of gradients")
        parts = [segment.bytes[rank * each : (rank + 1) * each] for rank in range(size)]
        begin = self.comm.rank * each

        def claim(start: int, stop: int) -> None:
            segment.claim(begin + start, begin + stop)

        self._gradients.open(parts, claim)

    @override
    def _shares_whole(self, full: Tensor) -> bool:
        return full.data_ptr() in self._shared

    @override
    def _spread(self, full: Tensor, number: int, counters: Counters) -> Callable[[], None] | None:
        counters.publish(GATHERED, number)
        return lambda: counters.wait(GATHERED, number)
