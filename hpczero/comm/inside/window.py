"""The node level in shared memory: whole parameters once per node, gradients summed straight out of peers' buffers.

Owns: the segments and who may touch what when. Must not know: other nodes, the order of sums, units.

[Note: Who may touch what]
Whole parameters (``Use.GATHER``): a rank writes its own part only, and only when no rank reads it. The order of a
training step sees to that: an update comes after an agreement of all ranks that their backward is over. ``spread`` only
waits for all ranks. If the memory is given back, each rank drops its own part once every rank of the node has released
the buffer.

Gradients (``Use.REDUCE``): gradients.py, [Note: Who may touch a gradient].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import HostAccelerator
from hpczero.comm.inside import gradients
from hpczero.comm.inside.level import Messages, NodeLevel, Parts
from hpczero.comm.inside.places import Ground
from hpczero.comm.inside.segment import Counters, Segment
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory, Use

# Columns of the counters: arrivals at spread, those of gradients, then releases.
ARRIVED, FIRST_GRADIENT = range(2)
FIRST_WHOLE = FIRST_GRADIENT + gradients.COLUMNS


class SegmentGround(Ground):
    """One segment, cut into as many parts as there are ranks."""

    def __init__(self, segment: Segment, rank: int, nbytes: int) -> None:
        self._segment = segment
        self._rank = rank
        self._nbytes = nbytes

    @override
    def part(self, rank: int) -> Tensor:
        return self._segment.bytes[rank * self._nbytes : (rank + 1) * self._nbytes]

    @override
    def claim(self, start: int, stop: int) -> None:
        begin = self._rank * self._nbytes
        self._segment.claim(begin + start, begin + stop)


class WholeBuffer(Buffer):
    """Whole parameters of a unit, one copy for the node. The ledger counts this rank's part of it."""

    shared = True

    def __init__(
        self,
        window: Window,
        number: int,
        segment: Segment,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
        lasts: bool,
    ) -> None:
        """Not collective. Nothing is held yet, so that not all units are held at once."""
        self.tensor = segment.bytes[: numel * dtype.itemsize].view(dtype)
        self.lasts = lasts
        self.number = number
        self.generation = 0
        self.segment = segment
        self._window = window
        self._memory = memory
        self._category = category
        self._nbytes = numel * dtype.itemsize // window.comm.size
        self._held = False

    def claim(self) -> None:
        """Get the pages of this rank's part; nothing if they are there."""
        if not self._held:
            self.segment.claim(*self.part)
            self._memory.add(self._category, self._nbytes)
            self._held = True

    @property
    def part(self) -> tuple[int, int]:
        """First byte of this rank's part, and the one after the last."""
        start = self._window.comm.rank * self._nbytes
        return start, start + self._nbytes

    @override
    def take(self) -> None:
        if self.lasts:
            return
        self.generation += 1
        if not self._held:
            self._window.drop_released()  # a peer that was late may have come since: one unit less beside this one
            self.claim()

    def release(self) -> None:
        """Say that this rank reads it no more. The pages go when no rank of the node reads them."""
        if not self.lasts:
            self._window.released(self)

    def drop(self) -> None:
        """Give the pages of this rank's part back."""
        if self._held:
            self.segment.give_back(*self.part)
            self._memory.add(self._category, -self._nbytes)
            self._held = False


class Window(NodeLevel):
    """Ranks of one node over shared memory. What is not allocated here moves by messages."""

    most_nbytes = 2**62  # nothing is copied

    def __init__(
        self,
        group: Group,
        memory: Memory,
        messages: Messages,
        *,
        drain: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[object]],
        overlap: bool = False,
        shares_wholes: bool = True,
    ) -> None:
        """Not collective.

        Args:
            group: borrowed.
            memory: ledger of buffers.
            messages: moves buffers that lie elsewhere; closed by ``close``.
            drain: enters every block of ``reading`` that was put off.
            waiting: context around a wait for other ranks (``Collectives.waiting``).
            overlap: whether one thread calls ``reading`` and ``released``, and another calls ``spread`` and enters the
                blocks of ``reading``, in the order of those calls.
            shares_wholes: whether a node has one copy of whole parameters. False gives each rank its own, in memory
                that is gone while they are sharded, as between nodes. A program that reads them then fails on one node
                too.
        """
        super().__init__(group.node, memory)
        self._group = group
        self._messages = messages
        self._overlap = overlap
        self.shares_wholes = shares_wholes
        self._gradients = gradients.SharedGradients(
            group,
            memory,
            HostAccelerator(),
            drain=drain,
            waiting=waiting,
            first_column=FIRST_GRADIENT,
        )
        self._wholes: list[WholeBuffer] = []
        self._places: dict[int, WholeBuffer] = {}
        self._to_drop: dict[int, WholeBuffer] = {}
        self._counters: Counters | None = None
        self._spreads = 0

    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        """A buffer as of ``Collectives.allocate``. Collective over the group if the memory is shared."""
        if use is Use.GATHER and self.shares_wholes:
            return self._allocate_whole(numel, dtype, category, keep)
        if use is Use.REDUCE:
            return self._gradients.allocate(numel, dtype, category=category, keep=keep)
        return super().allocate(numel, dtype, category=category, use=use, keep=keep)

    def _allocate_whole(
        self, numel: int, dtype: torch.dtype, category: str, keep: bool
    ) -> WholeBuffer:
        nbytes = numel * dtype.itemsize
        with self._group.agreed("share memory for parameters"):
            segment = Segment.create(self.comm, nbytes, f"{nbytes:,} bytes of parameters")
        whole = WholeBuffer(
            self,
            len(self._wholes),
            segment,
            numel,
            dtype,
            memory=self.memory,
            category=category,
            lasts=keep,
        )
        if keep:
            with self._group.agreed("claim shared memory for parameters"):
                whole.claim()
        self._wholes.append(whole)
        self._places[whole.tensor.data_ptr()] = whole
        return whole

    def settle(self) -> None:
        """Lay the gradients out in shared memory. Collective over the group."""
        self._counters = Counters(self.comm, FIRST_WHOLE + len(self._wholes), naps=self._overlap)
        each = self._gradients.lay_out()
        nbytes = each * self.comm.size
        with self._group.agreed("share memory for gradients"):
            segment = Segment.create(self.comm, nbytes, f"{nbytes:,} bytes of gradients")
        self._gradients.open(SegmentGround(segment, self.comm.rank, each), self._counters)

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        if self._counters is None:
            return False
        if use is Use.GATHER:
            return full.data_ptr() in self._places
        return self._gradients.fits(full)

    # --- gather --------------------------------------------------------------------------------------------------

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        counters = self._counters
        if counters is None or not self.shares(full, Use.GATHER):
            return self._messages.spread(full)
        self._spreads = arrival = self._spreads + 1
        counters.publish(ARRIVED, arrival)
        return lambda: counters.wait(ARRIVED, arrival)

    def released(self, whole: WholeBuffer) -> None:
        """Say that this rank has no more use for the content of ``whole``."""
        if self._counters is not None and whole.held:
            self._counters.publish(FIRST_WHOLE + whole.number, whole.generation)
            self._to_drop[whole.number] = whole
            self.drop_released()

    def drop_released(self) -> None:
        """Give back what every rank of the node has released by now. Not collective."""
        if self._counters is None:
            return
        for other in list(self._to_drop.values()):
            if self._counters.reached(FIRST_WHOLE + other.number, other.generation):
                other.drop()
                del self._to_drop[other.number]

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        if not self.shares(full, Use.REDUCE):
            return self._messages.reading(full)
        return self._gradients.reading(full)

    @override
    def close(self) -> None:
        if self._counters is not None:
            self._gradients.close()
            self._counters.free()
            self._counters = None
        self._messages.close()
