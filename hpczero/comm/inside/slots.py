"""Slots: shared memory that the buffers of a node take in turn.

Owns: which range of one shared file a buffer has, and the addresses at which a process sees it. Must not know: units,
gradients, counters, how ranks tell each other anything.

    addresses of a buffer    the same for ever, because autograd keeps pointing there
    range of the file        another one at each take; its pages stay where they are from one buffer to the next

A buffer that is given back and taken again would cost the kernel a cleared page and a fault for every 4 KiB, on every
rank. A range that another buffer leaves costs one call, which enters all its pages into the table of the process.

[Note: How much is kept]
A period ends when no buffer is in use: a forward, a backward, a block in which a program looks at all parameters. What
nobody has is kept as far as this period or the one before has needed it at one time, and from one period to the next as
far as both have. So nothing that is kept makes the most that was ever held larger, and what was needed once goes.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from dataclasses import dataclass

import torch

from hpczero.comm.inside.segment import NOTHING, PAGE, Segment, addresses, map_at
from hpczero.errors import CommError
from hpczero.memory.pages import padded

POPULATE = 0x8000  # mman.h: the same on all Linux but Alpha, MIPS and PA-RISC


@dataclass(frozen=True)
class Slot:
    """A range of the file.

    Attributes:
        begin: its first byte, at a page.
        fresh: whether it has no pages yet.
    """

    begin: int
    fresh: bool


class Slots:
    """Which buffer has which range of ``segment``. One rank of a node keeps this book."""

    def __init__(self, segment: Segment) -> None:
        """``segment`` has room for all buffers at once; not collective."""
        self._segment = segment
        self._taken: dict[int, tuple[Slot, int]] = {}  # number of the buffer: its range and bytes
        self._kept: dict[int, int] = {}  # begin of a range that nobody has: bytes; the oldest first
        self._bare: defaultdict[int, list[int]] = defaultdict(list)  # bytes: begins without pages
        self._end = 0
        self._used = self._most = self._most_before = (
            0  # bytes in use now, at most in this period, in the one before
        )

    @property
    def held_nbytes(self) -> int:
        """Bytes of all ranges that have pages."""
        return self._used + sum(self._kept.values())

    def take(self, number: int, nbytes: int) -> Slot:
        """The range of buffer ``number``: the one that it has, or one of the same size that nobody has.

        One that it has is as fresh as it was: a rank may hear of the second take first, and has brought no pages then.
        """
        nbytes = padded(nbytes, PAGE)
        if number in self._taken:
            return self._taken[number][0]
        kept = next((begin for begin, size in self._kept.items() if size == nbytes), None)
        self._used += nbytes
        self._most = max(self._most, self._used)
        if kept is not None:
            del self._kept[kept]
            slot = Slot(kept, fresh=False)
        else:
            self._keep(max(self._most, self._most_before))
            slot = Slot(self._new(nbytes), fresh=True)
        self._taken[number] = slot, nbytes
        return slot

    def leave(self, number: int) -> None:
        """No rank of the node reads the buffer any more."""
        slot, nbytes = self._taken.pop(number)
        self._used -= nbytes
        if nbytes:  # a range of no bytes begins where the next one does, and would take its place in the book
            self._kept[slot.begin] = nbytes
        if not self._taken:
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

    Attributes:
        bytes: (nbytes,) uint8; zero where there is nothing, and what is written there then is lost.
    """

    def __init__(self, nbytes: int) -> None:
        """Nothing is there yet."""
        self._nbytes = padded(max(nbytes, 1), PAGE)
        with torch.inference_mode(False):
            whole = addresses(self._nbytes)
            self.bytes = whole[:nbytes]
        self._address = whole.data_ptr()  # of no bytes torch has no address
        self._begin: int | None = None

    def show(self, file: int, slot: Slot) -> None:
        """Put the range of ``file`` behind the addresses; nothing if it is there.

        Raises:
            CommError: the kernel will not.
        """
        if self._begin != slot.begin:
            # Pages that are not there yet come from the rank whose part they are (segment.py, [Note: Full /dev/shm]).
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
