"""Whole parameters of a node that pass: buffers that are given back between uses, in shared memory.

Owns: which rank may see which buffer when, and how the ranks of a node come to the same place for it. Must not know:
units, gradients, other nodes.

[Note: Where whole parameters lie]
Buffers that are given back between uses take slots of one segment in turn. The first rank of the node chooses: only it
looks who has released what, because two ranks that look may see different things. The others read its choice, and wait
for it if they are ahead. It never waits for a release: a rank that goes on using a buffer keeps its slot from others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from hpczero.comm.inside.segment import PAGE, Counters, Segment
from hpczero.comm.inside.slots import Addresses, Slot, Slots
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory
from hpczero.memory.pages import padded

# Columns of each buffer: which use a rank has released, and where the first rank has put it.
RELEASED, PLACE, COLUMNS = 0, 1, 2
GENERATION, FRESH = 33, 1 << 32  # bits of what the first rank tells: generation, fresh, page


class PassingBuffer(Buffer):
    """Whole parameters of a unit that are given back between uses; one copy for the node.

    The ledger counts this rank's part of it while this rank uses it.
    """

    shared = True
    lasts = False

    def __init__(
        self,
        passing: Passing,
        number: int,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
    ) -> None:
        """Not collective. Nothing is held yet, so that not all units are held at once."""
        self.addresses = Addresses(numel * dtype.itemsize)
        self.tensor = self.addresses.bytes.view(dtype)
        self.number, self.whole_nbytes = number, numel * dtype.itemsize
        self.generation = 0
        self._passing, self._memory, self._category = passing, memory, category
        self._nbytes = -(-self.whole_nbytes // passing.ranks)
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

    def __init__(
        self,
        group: Group,
        memory: Memory,
        *,
        drain: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[object]],
        first_column: int,
    ) -> None:
        """Arguments as of ``Window``; ``first_column``: of the counters."""
        self._group, self._node, self._memory = group, group.node, memory
        self._drain, self._waiting = drain, waiting
        self._first = first_column
        self._buffers: list[PassingBuffer] = []
        self._taken: set[int] = set()  # numbers of those that have a slot, as the first rank knows
        self._counters: Counters | None = None
        self.segment: Segment | None = None
        self._slots: Slots | None = None  # of the first rank

    @property
    def ranks(self) -> int:
        """Of the node."""
        return self._node.size

    @property
    def columns(self) -> int:
        """Of the counters, for all buffers together."""
        return COLUMNS * len(self._buffers)

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str) -> PassingBuffer:
        """As of ``Collectives.allocate``, equal on all ranks; nothing is held until it is taken."""
        number = len(self._buffers)
        buffer = PassingBuffer(self, number, numel, dtype, memory=self._memory, category=category)
        self._buffers.append(buffer)
        return buffer

    def open(self, counters: Counters) -> None:
        """All buffers have been asked for. Collective over the group.

        Raises:
            CommError: memory cannot be shared; on every rank.
        """
        self._counters = counters
        if not self._buffers:
            return
        nbytes = sum(padded(buffer.whole_nbytes, PAGE) for buffer in self._buffers)
        with self._group.agreed("share memory for parameters"):
            what = f"{nbytes:,} bytes of parameters"
            self.segment = Segment.create(self._node, nbytes, what, mapped=False)
        if self._node.rank == 0:
            self._slots = Slots(self.segment)

    def close(self) -> None:
        """The counters go."""
        self._counters = None

    def show(self, buffer: PassingBuffer) -> None:
        """Put memory behind ``buffer``, the same on all ranks of the node. See [Note: Where whole parameters lie].

        Raises:
            CommError: there is none left; on this rank alone, so whoever catches it leaves the others waiting.
        """
        assert self.segment is not None, "settled"
        slot = self._slot(buffer)
        buffer.addresses.show(self.segment.file, slot)
        if slot.fresh:
            part = buffer.nbytes
            begin = slot.begin + self._node.rank * part
            self.segment.claim(begin, min(begin + part, slot.begin + buffer.whole_nbytes))

    def _slot(self, buffer: PassingBuffer) -> Slot:
        counters = self._counters
        assert counters is not None, "settled"
        column = self._column(buffer.number, PLACE)
        if self._slots is not None:
            self._sweep()
            slot = self._slots.take(buffer.number, buffer.whole_nbytes)
            self._taken.add(buffer.number)
            counters.publish(column, _told(buffer.generation, slot))
            return slot
        least = buffer.generation << GENERATION
        if counters.read(0, column) < least:
            with self._waiting():
                self._drain()  # the first rank may wait for what this one has put off
                with self._group.watchdog.collective(
                    "waiting for the first rank of the node to unshard"
                ):
                    counters.wait_for(0, column, least)
        return _heard(counters.read(0, column))

    def released(self, buffer: PassingBuffer) -> None:
        """This rank has no more use for the content of ``buffer``."""
        buffer.addresses.hide()
        if self._counters is not None:
            self._counters.publish(self._column(buffer.number, RELEASED), buffer.generation)
            self._sweep()

    def _sweep(self) -> None:
        """Free what every rank of the node has released by now; on the first rank. Not collective."""
        if self._slots is None or self._counters is None:
            return
        for number in list(self._taken):
            generation = self._buffers[number].generation
            if self._counters.reached(self._column(number, RELEASED), generation):
                self._slots.leave(number)
                self._taken.remove(number)

    def _column(self, number: int, which: int) -> int:
        return self._first + COLUMNS * number + which


def _told(generation: int, slot: Slot) -> int:
    """A number that only grows with the generation."""
    return generation << GENERATION | FRESH * slot.fresh | slot.begin // PAGE


def _heard(told: int) -> Slot:
    return Slot((told & (FRESH - 1)) * PAGE, fresh=bool(told & FRESH))
