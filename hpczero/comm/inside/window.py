"""The node level in shared memory: whole parameters once per node, gradients summed straight out of peers' buffers.

Owns: the segments and who may touch what when. Must not know: other nodes, the order of sums, units.

[Note: Who may touch what]
Whole parameters (``Use.GATHER``): a rank writes its own part only, and only when no rank reads it. The order of a
training step sees to that: an update comes after an agreement of all ranks that their backward is over. ``spread`` only
waits for all ranks.

Buffers that are given back between uses: passing.py.

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
from hpczero.comm.inside.level import NodeLevel, Parts
from hpczero.comm.inside.passing import Passing
from hpczero.comm.inside.places import Ground
from hpczero.comm.inside.segment import Counters, Segment
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory, Use

# Columns of the counters: arrivals at spread, those of gradients, then those of whole parameters that pass.
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
    """Whole parameters of a unit that last, one copy for the node. The ledger counts this rank's part of it."""

    shared = lasts = True

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
    ) -> None:
        """Not collective. Gets the pages of this rank's part, as one of ``size``.

        Raises:
            CommError: there are none left.
        """
        self.tensor = segment.bytes[: numel * dtype.itemsize].view(dtype)
        self._address = self.tensor.data_ptr()
        whole = numel * dtype.itemsize
        self._nbytes = -(-whole // size)
        segment.claim(rank * self._nbytes, min((rank + 1) * self._nbytes, whole))
        segment.close_file()  # a model may have more units than a process may have files
        memory.add(category, self._nbytes)
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


class Window(NodeLevel):
    """Ranks of one node over shared memory. What is not allocated here moves by messages."""

    title = "shared memory"
    most_nbytes = 2**62  # nothing is copied

    def __init__(
        self,
        group: Group,
        memory: Memory,
        messages: NodeLevel,
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
        self._passing = Passing(
            group, memory, drain=drain, waiting=waiting, first_column=FIRST_WHOLE
        )
        self._shared: set[int] = set()  # addresses of whole parameters that the node sees
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

    def _allocate_whole(self, numel: int, dtype: torch.dtype, category: str, keep: bool) -> Buffer:
        whole: Buffer
        if keep:
            nbytes = numel * dtype.itemsize
            with self._group.agreed("share memory for parameters"):
                segment = Segment.create(self.comm, nbytes, f"{nbytes:,} bytes of parameters")
            rank, size = self.comm.rank, self.comm.size
            with self._group.agreed("claim shared memory for parameters"):
                whole = WholeBuffer(
                    segment, rank, size, numel, dtype, memory=self.memory, category=category
                )
        else:
            whole = self._passing.allocate(numel, dtype, category=category)
        self._shared.add(whole.tensor.data_ptr())
        return whole

    def settle(self) -> None:
        """Lay the gradients out in shared memory. Collective over the group."""
        columns = FIRST_WHOLE + self._passing.columns
        self._counters = Counters(self.comm, columns, naps=self._overlap)
        self._passing.open(self._counters)
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
            return full.data_ptr() in self._shared
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

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        if not self.shares(full, Use.REDUCE):
            return self._messages.reading(full)
        return self._gradients.reading(full)

    @override
    def close(self) -> None:
        if self._counters is not None:
            self._gradients.close()
            self._passing.close()
            self._counters.free()
            self._counters = None
        self._messages.close()
