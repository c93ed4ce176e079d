"""Gradients that the ranks of a node read out of each other's memory.

Owns: who may read and fill which place when, on one node. Must not know: what kind of memory it is (`Ground`), the
order of sums, whole parameters, units.

[Note: Who may touch a gradient]
A rank fills a place in its own part of the arena, tells the node where (``reading``), reads the others' places, and
says when it has. A place is filled again only when everybody has read it. Where the memory is a device's, what a rank
tells has been done there: it waits for the device first (accelerator/base.py: [Note: Two clocks]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator
from hpczero.comm.inside.level import Parts
from hpczero.comm.inside.places import Arena, Ground
from hpczero.comm.inside.segment import Counters
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory

LOCATIONS = 8  # reductions that a rank may start before its peers have read the first of them
# Columns of the counters: gradients ready, gradients read, then where gradients lie.
COLUMNS = 2 + LOCATIONS


class SharedGradients:
    """The arena of one transport on one node. Methods are collective over the node unless they say otherwise."""

    def __init__(
        self,
        group: Group,
        memory: Memory,
        accelerator: Accelerator,
        *,
        drain: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[object]],
        first_column: int,
        tells_late: bool = False,
    ) -> None:
        """Not collective.

        Args:
            group: borrowed.
            memory: ledger.
            accelerator: whose memory it is.
            drain: enters every block of ``reading`` that was put off.
            waiting: around a wait for other ranks, see ``Collectives.waiting``.
            first_column: of the counters; ``COLUMNS`` are used.
            tells_late: peers are told where a gradient lies when the block of ``reading`` is entered, by a thread that
                may wait for the device, and not by the call.
        """
        self._node = group.node
        self._group = group
        self._accelerator = accelerator
        self._drain = drain
        self._waiting = waiting
        self._ready, self._read = first_column, first_column + 1
        self._location = first_column + 2
        self._tells_late = tells_late
        self._arena = Arena(
            self._node.rank,
            memory,
            wait_until_read=self._wait_until_read,
            device=accelerator.device,
        )
        self._counters: Counters | None = None
        self._reductions = 0

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str, keep: bool) -> Buffer:
        """As ``Collectives.allocate`` for ``Use.REDUCE``; not collective, but equal on all ranks of the node."""
        return self._arena.allocate(numel, dtype, category=category, keep=keep)

    def lay_out(self) -> int:
        """All buffers are asked for. Returns the bytes of each rank's part; not collective."""
        return self._arena.lay_out()

    def open(self, ground: Ground, counters: Counters) -> None:
        """Use them from now on; not collective."""
        self._counters = counters
        self._arena.open(ground)

    def close(self) -> None:
        """Point into the ground no more; not collective. The counters are the caller's."""
        self._counters = None
        self._arena.close()

    def fits(self, full: Tensor) -> bool:
        """Whether peers can see ``full``. Not collective, but the same on all ranks of the node."""
        return self._counters is not None and self._arena.fits(full)

    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        """``Parts`` of everybody's ``full``, which fits into one place."""
        assert self._counters is not None, "opened"
        self._reductions = number = self._reductions + 1
        self._wait_until_read(number - LOCATIONS)  # the number before in the same column
        location = self._arena.locate(full, number)
        if not self._tells_late:
            self._tell(number, location)
        return self._reading(number, location, full.numel(), full.dtype)

    def _tell(self, number: int, location: int) -> None:
        assert self._counters is not None, "opened"
        self._accelerator.finish()
        self._counters.publish(self._location + number % LOCATIONS, location)
        self._counters.publish(self._ready, number)

    @contextmanager
    def _reading(
        self, number: int, location: int, numel: int, dtype: torch.dtype
    ) -> Iterator[Parts]:
        counters, arena = self._counters, self._arena
        assert counters is not None, "opened"
        if self._tells_late:
            self._tell(number, location)
        counters.wait(self._ready, number)
        column = self._location + number % LOCATIONS
        peers = [
            arena.view_of(rank, counters.read(rank, column), numel, dtype)
            for rank in range(self._node.size)
        ]
        begin = self._node.rank * (numel // self._node.size)

        def parts(start: int, count: int) -> list[Tensor]:
            return [peer[begin + start : begin + start + count] for peer in peers]

        yield parts
        self._accelerator.finish()
        counters.publish(self._read, number)

    def _wait_until_read(self, reduction: int) -> None:
        if self._counters is None or self._counters.reached(self._read, reduction):
            return
        what = f"waiting for peers to read gradient {reduction}"
        with self._waiting():
            self._drain()  # this rank may be the one that has not read
            if not self._counters.reached(self._read, reduction):
                with self._group.watchdog.watch(what):
                    self._counters.wait(self._read, reduction)
