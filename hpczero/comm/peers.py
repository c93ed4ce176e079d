"""The node level by peers' memory: each rank exports one block, and the others of its node read from it.

Owns: the block, its mapping by peers, the places through which whole parameters are handed on. Must not know: other
nodes, the order of sums, units. On devices this is CUDA IPC and the copy engines. On the host it is shared memory, the
twin.

    all-gather       own part into a place of one's block | told | each pulls the others' parts
    reduce-scatter   the gradient lies in a place of one's block | told | each sums its part straight out of all blocks

[Note: One copy more]
A rank copies its own part into a place before others pull it. The alternative, to pull from where the part lies, would
save 1/L of the bytes at the speed of the device's own memory. With the copy whole parameters are ordinary memory, which
is given back between uses. Two places in turn are enough. A rank that offers part n + 1 has pulled all parts n before.
No rank fills the place of n again, for n + 2, without having pulled every rank's part n + 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Attached, MemoryExport
from hpczero.comm.inside import Counters, Ground, NodeLevel, Parts, Places
from hpczero.job.group import Group
from hpczero.memory.buffers import Buffer, Memory, Use
from hpczero.plan.footprint import PLACE_ALIGNMENT, PULLED_IN_TURN, pulled_nbytes

# Gradients that the ranks of a node read out of each other's memory.
#
# [Note: Who may touch a gradient]
# A rank fills a place in its own part of the ground and tells the node where it lies (``reading``). It then reads the
# others' places, and says when it has. A place is filled again only when all ranks have read it. On a device a rank
# tells only what the device has done: it waits for the device first (accelerator/base.py: [Note: Two clocks]).

LOCATIONS = 8  # reductions that a rank may start before its peers have read the first of them
# Columns of the counters: gradients ready, gradients read, then where gradients lie.
GRADIENT_COLUMNS = 2 + LOCATIONS


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


# Columns of the counters: parts that may be pulled, then those of gradients.
OFFERED, FIRST_GRADIENT = range(2)
COLUMNS = FIRST_GRADIENT + GRADIENT_COLUMNS


class ExportGround(Ground):
    """Every rank's block as this rank sees it. Gradients lie at its beginning."""

    is_whole = True

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    @override
    def part(self, rank: int) -> Tensor:
        return self.parts[rank]


class Ipc(NodeLevel):
    """Ranks of one node that read each other's device memory. What does not fit moves by messages."""

    title = "peers' memory"
    most_nbytes = 2**62  # nothing is copied to be summed

    def __init__(
        self,
        group: Group,
        memory: Memory,
        accelerator: Accelerator,
        messages: NodeLevel,
        *,
        drain: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[object]],
        overlap: bool = False,
    ) -> None:
        """Not collective.

        Args:
            group: borrowed.
            memory: ledger of buffers.
            accelerator: of this rank; ranks of a node may share one device.
            messages: moves buffers that do not fit; closed by ``close``.
            drain: enters every block of ``reading`` that was put off.
            waiting: context around a wait for other ranks (``Collectives.waiting``).
            overlap: as in ``Window``.
        """
        super().__init__(group.node, memory, device=accelerator.device)
        self._group = group
        self._accelerator = accelerator
        self._messages = messages
        self._overlap = overlap
        self._gradients = SharedGradients(
            group,
            memory,
            accelerator,
            drain=drain,
            waiting=waiting,
            first_column=FIRST_GRADIENT,
            tells_late=overlap,
        )
        self._part_nbytes: list[int] = []
        self._place_nbytes = 0
        self._first_place = 0
        self._block: MemoryExport | None = None
        self._attached: list[Attached] = []
        self._parts: list[Tensor] = []
        self._counters: Counters | None = None
        self._spreads = 0

    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        """A buffer as of ``Collectives.allocate``. ``settle`` exports what all buffers need together."""
        if use is Use.REDUCE:
            return self._gradients.allocate(numel, dtype, category=category, keep=keep)
        if use is Use.GATHER:
            self._part_nbytes.append(numel * dtype.itemsize // self.comm.size)
        return super().allocate(numel, dtype, category=category, use=use, keep=keep)

    def settle(self) -> None:
        """Export this rank's block and map those of its peers. Collective over the group.

        Raises:
            CommError: there is not enough memory, or peers cannot map it; on every rank.
        """
        places = pulled_nbytes(self._part_nbytes)
        self._place_nbytes = places // PULLED_IN_TURN
        self._first_place = -(-self._gradients.lay_out() // PLACE_ALIGNMENT) * PLACE_ALIGNMENT
        nbytes = self._first_place + places
        with self._group.agreed("export memory to the ranks of the node"):
            self._block = self._accelerator.export(nbytes)
        block = self._block
        assert block is not None, "exported"
        tickets = self.comm.allgather((block.ticket, nbytes))
        with self._group.agreed("map the memory of the ranks of the node"):
            for rank, (ticket, size) in enumerate(tickets):
                if rank == self.comm.rank:
                    self._parts.append(block.memory)
                else:
                    self._attached.append(self._accelerator.attach(ticket, size))
                    self._parts.append(self._attached[-1].memory)
        self.comm.Barrier()
        block.seal()
        self.memory.add("exchange", places)
        self._counters = Counters(self.comm, COLUMNS, naps=self._overlap)
        self._gradients.open(ExportGround(self._parts), self._counters)

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        if self._counters is None:
            return False
        if use is Use.GATHER:
            nbytes = full.numel() * full.element_size() // self.comm.size
            return 0 < nbytes <= self._place_nbytes
        return self._gradients.fits(full)

    def spread(self, full: Tensor) -> Callable[[], None] | None:
        """Copy peers' parts out of their memory ([Note: One copy more])."""
        counters, comm = self._counters, self.comm
        if counters is None or not self.shares(full, Use.GATHER):
            return self._messages.spread(full)
        self._spreads = number = self._spreads + 1
        flat = full.view(torch.uint8)
        nbytes = len(flat) // comm.size
        start = self._first_place + number % PULLED_IN_TURN * self._place_nbytes
        place = slice(start, start + nbytes)
        self._parts[comm.rank][place].copy_(flat[comm.rank * nbytes :][:nbytes])
        self._accelerator.finish()
        counters.publish(OFFERED, number)
        for distance in range(1, comm.size):  # not everybody from the same peer at once
            peer = (comm.rank + distance) % comm.size
            counters.wait_for(peer, OFFERED, number)
            flat[peer * nbytes :][:nbytes].copy_(self._parts[peer][place], non_blocking=True)
        self._accelerator.finish()
        return None

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        if not self.shares(full, Use.REDUCE):
            return self._messages.reading(full)
        return self._gradients.reading(full)

    @override
    def close(self) -> None:
        if self._counters is not None:
            self._gradients.close()
        self._parts.clear()
        for attached in self._attached:  # some of them, where ``settle`` failed
            attached.close()
        self._attached.clear()
        if self._counters is not None:
            self.comm.Barrier()  # nobody has it mapped when its owner gives it back
            self._counters.free()
            self._counters = None
        if self._block is not None:
            with contextlib.suppress(Exception):  # the job ends; the driver takes it back anyway
                self._block.close()
            self._block = None
        self._messages.close()
