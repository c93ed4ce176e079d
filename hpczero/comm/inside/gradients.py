"""Gradients that the ranks of a node read out of each other's memory.

Owns: who may read and fill which place when, on one node. Must not know: what kind of memory it is (`Ground`), the
order of sums, whole parameters, units.

[Note: Who may touch a gradient]
A rank fills a place in its own part of the ground and tells the node where it lies (``reading``). It then reads the
others' places, and says when it has. A place is filled again only when all ranks have read it. On a device a rank tells
only what the device has done: it waits for the device first (accelerator/base.py: [Note: Two clocks]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator
from hpczero.comm.inside.level import Parts
from hpczero.comm.inside.places import Ground, Places
from hpczero.comm.inside.segment import Counters
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory

LOCATIONS = 8  # reductions that a rank may start before its peers have read the first of them
# Columns of the counters: gradients ready, gradients read, then where gradients lie.
COLUMNS = 2 + LOCATIONS


class SharedGradients:
    """Gradients of one transport on one node. Methods are collective over the node unless they say otherwise."""

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
            memory: ledger of buffers.
            accelerator: the gradients are its memory.
            drain: enters every block of ``reading`` that was put off.
            waiting: context around a wait for other ranks (``Collectives.waiting``).
            first_column: first of the ``COLUMNS`` columns of the counters that are used.
            tells_late: whether peers are told where a gradient lies when the block of ``reading`` is entered, instead
                of by the call. The thread that enters it may wait for the device.
        """
        self._node = group.node
        self._group = group
        self._accelerator = accelerator
        self._drain = drain
        self._waiting = waiting
        self._ready, self._read = first_column, first_column + 1
        self._location = first_column + 2
        self._tells_late = tells_late
        self._places = Places(
            self._node.rank,
            memory,
            wait_until_read=self._wait_until_read,
            device=accelerator.device,
        )
        self._counters: Counters | None = None
        self._reductions = 0

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str, keep: bool) -> Buffer:
        """A buffer as of ``Collectives.allocate`` with ``Use.REDUCE``.

        Not collective, but equal on all ranks of the node.
        """
        return self._places.allocate(numel, dtype, category=category, keep=keep)

    def lay_out(self) -> int:
        """Lay all buffers out, once they are asked for. Returns the bytes of each rank's part. Not collective."""
        return self._places.lay_out()

    def open(self, ground: Ground, counters: Counters) -> None:
        """Use the ground and the counters from now on. Not collective."""
        self._counters = counters
        self._places.open(ground)

    def close(self) -> None:
        """Stop to point into the ground. Not collective. The counters stay the caller's."""
        self._counters = None
        self._places.close()

    def fits(self, full: Tensor) -> bool:
        """Whether peers can see ``full``. Not collective, but the same on all ranks of the node."""
        return self._counters is not None and self._places.fits(full)

    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        """Context: ``Parts`` of every rank's ``full``, which fits into one place."""
        assert self._counters is not None, "opened"
        self._reductions = number = self._reductions + 1
        self._wait_until_read(number - LOCATIONS)  # the number before in the same column
        location = self._places.locate(full, number)
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
        counters, places = self._counters, self._places
        assert counters is not None, "opened"
        if self._tells_late:
            self._tell(number, location)
        counters.wait(self._ready, number)
        column = self._location + number % LOCATIONS
        peers = [
            places.view_of(rank, counters.read(rank, column), numel, dtype)
            for rank in range(self._node.size)
        ]

        def parts(start: int, count: int) -> list[Tensor]:
            return [peer[start : start + count] for peer in peers]

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
                with self._group.watchdog.collective(what):
                    self._counters.wait(self._read, reduction)
