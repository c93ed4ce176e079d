"""Node levels whose ranks read each other's gradients, and the one that exports a block of each rank to its peers.

On devices the blocks are CUDA IPC and the copy engines move them. On the host they are shared memory, the twin.

    all-gather       own part into a place of one's block | told | each pulls the others' parts
    reduce-scatter   the gradient lies in a place of one's block | told | each sums its part straight out of all blocks

[Note: One copy more]
A rank copies its own part into a place before others pull it. The alternative, to pull from where the part lies, would
save 1/L of the bytes at the speed of the device's own memory. With the copy whole parameters are ordinary memory, which
is given back between uses. Two places in turn are enough. A rank that offers part n + 1 has pulled all parts n before.
No rank fills the place of n again, for n + 2, without having pulled every rank's part n + 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.comm.inside import PAGE, Counters, NodeLevel, Parts, PeerBlocks
from hpczero.memory.buffers import Buffer, Use, lasting
from hpczero.memory.pages import padded
from hpczero.plan.footprint import PLACE_ALIGNMENT, PULLED_IN_TURN, pulled_nbytes

LOCATIONS = 8  # reductions that a rank may start before its peers have read the first of them
# Columns of the counters: gathers begun, gradients ready, gradients read, then where gradients lie.
GATHERED, READY, READ, LOCATION = range(4)
COLUMNS = LOCATION + LOCATIONS


class SharedLevel(NodeLevel):
    """A level whose ranks read each other's gradients. Buffers that lie elsewhere move by messages.

    Attributes:
        group: borrowed; its node is the level's.
        accelerator: the gradients are its memory.
        counters: what each rank of the node has done; None before ``settle``.
    """

    most_nbytes = 2**62  # nothing is copied to be summed

    def __init__(
        self,
        transport: Collectives,
        messages: NodeLevel,
        *,
        overlap: bool = False,
        tells_late: bool = False,
    ) -> None:
        """Not collective.

        Args:
            transport: whose level it is.
            messages: moves buffers that lie elsewhere; closed by ``close``.
            overlap: whether one thread calls ``reading`` and releases buffers, and another calls ``spread`` and enters
                the blocks of ``reading``, in the order of those calls.
            tells_late: whether peers are told where a gradient lies when the block of ``reading`` is entered, instead
                of by the call. The thread that enters it may wait for the device.
        """
        super().__init__(transport.group.node, transport.memory, device=transport.device)
        self.group, self.accelerator = transport.group, transport.reach.accelerator
        self.counters: Counters | None = None
        self._transport, self._messages = transport, messages
        self._overlap = overlap
        self._gradients = SharedGradients(self, tells_late=tells_late)
        self._gathers = 0

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        if use is Use.REDUCE:
            return self._gradients.allocate(numel, dtype, category=category, keep=keep)
        return super().allocate(numel, dtype, category=category, use=use, keep=keep)

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        if self.counters is None:
            return False
        return self._shares_whole(full) if use is Use.GATHER else self._gradients.fits(full)

    @abstractmethod
    def _shares_whole(self, full: Tensor) -> bool:
        """As ``shares``, for whole parameters."""

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        if self.counters is None or not self._shares_whole(full):
            return self._messages.spread(full)
        self._gathers += 1
        return self._spread(full, self._gathers, self.counters)

    @abstractmethod
    def _spread(self, full: Tensor, number: int, counters: Counters) -> Callable[[], None] | None:
        """As ``spread``, without a message; the ``number``-th time."""

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        if not self.shares(full, Use.REDUCE):
            return self._messages.reading(full)
        return self._gradients.reading(full)

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Return when the counters of peers have ``reached`` something; ``what`` says for the watchdog what it is."""
        if reached():
            return
        with self._transport.waiting():
            self._transport.drain()  # peers may wait for what this rank has put off
            if not reached():
                assert self.counters is not None, "settled"
                with self.group.watchdog.collective(what):
                    self.counters.wait_until(reached)

    @override
    def close(self) -> None:
        self._gradients.close()
        if self.counters is not None:
            self.counters.free()
            self.counters = None
        self._messages.close()


# Where a rank's gradients lie so that its node can read them.
#
# [Note: Places]
# Most gradients live from a unit's backward to its reduction, so two places serve all units in turn. The buffer that
# was asked for first has a place of its own. It is the root unit's, whose first gradient comes early and whose last
# comes late. Backward may reach units in another order than they are reduced, and a unit may then find its place taken.
# Its gradient goes to private memory and moves to the spare place when its turn has come. Gradients that are kept
# (stage 1) have a place each. ``Plan.memory`` counts by the same rule.
#
# [Note: Who may touch a gradient]
# A rank fills a place in its own part and tells the node where it lies (``reading``). It then reads the others' places,
# and says when it has. A place is filled again only when all ranks have read it. On a device a rank tells only what the
# device has done: it waits for the device first (accelerator/base.py: [Note: Two clocks]).

IN_TURN = 2


@dataclass(eq=False)
class BufferPlace:
    """Some bytes of this rank's part that one gradient at a time may hold.

    Of its ``nbytes``, ``claimed`` have memory behind them. ``is_kept``: it belongs to a gradient that is kept, where
    its bytes are counted. ``reduction`` is the number of the last reduction that read it.
    """

    start: int
    nbytes: int
    is_kept: bool
    claimed: int = 0
    taken: bool = False
    reduction: int = 0


class GradientBuffer(Buffer):
    """One unit's local gradient. It lies in a place if it has one that is free, in private memory otherwise."""

    def __init__(
        self, gradients: SharedGradients, numel: int, dtype: torch.dtype, category: str, keep: bool
    ) -> None:
        self.tensor = lasting(0, dtype, gradients.device)
        self.place: BufferPlace | None = None
        self.keeps = keep
        self._gradients = gradients
        self._numel, self._dtype = numel, dtype
        self._nbytes = numel * dtype.itemsize
        self._memory, self._category = gradients.memory, category
        self._held = False
        self._in: BufferPlace | None = None  # the place, while the gradient lies there
        if keep:
            self._memory.add(category, self._nbytes)

    @override
    def take(self) -> None:
        """Take the memory. Waits until a place that was read before may be written again."""
        if self._held:
            return
        if self.place is not None and not self.place.taken:
            self._in = self.place
            self._gradients.take(self._in, self._nbytes)
            self.tensor = self._gradients.view(self._in, self._numel, self._dtype)
        else:
            self.tensor = lasting(self._numel, self._dtype, self._gradients.device)
            self._memory.add(self._category, self._nbytes)
        self._held = True

    @override
    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        if self._in is not None:
            self._in.taken = False
            self._in = None
        else:
            self._memory.add(self._category, -self._nbytes)
        self.tensor = lasting(0, self._dtype, self._gradients.device)


class SharedGradients:
    """Gradients of one level. Methods are collective over the node unless they say otherwise.

    Places that are not kept count in ``memory`` as ``exchange`` from their first use, or from the start where all of
    them have memory. Gradients that have no place are on ``device``.
    """

    def __init__(self, level: SharedLevel, *, tells_late: bool) -> None:
        """Not collective; ``tells_late``: as of ``SharedLevel``."""
        self.memory, self.device = level.memory, level.device
        self._level, self._rank = level, level.comm.rank
        self._tells_late = tells_late
        self._buffers: list[GradientBuffer] = []
        self._places: list[BufferPlace] = []
        self._spare: BufferPlace | None = None
        self._by_address: dict[int, BufferPlace] = {}
        self._parts: Sequence[Tensor] = ()
        self._claim: Callable[[int, int], None] | None = None
        self._reductions = 0

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str, keep: bool) -> Buffer:
        """A buffer as of ``Collectives.allocate`` with ``Use.REDUCE``, whose memory comes later.

        Not collective, but equal on all ranks of the node. A buffer that is asked for when all places are laid out has
        no place.
        """
        if self._parts and keep:
            return Buffer(
                numel, dtype, memory=self.memory, category=category, keep=True, device=self.device
            )
        buffer = GradientBuffer(self, numel, dtype, category, keep)
        self._buffers.append(buffer)
        return buffer

    def lay_out(self) -> int:
        """Give every buffer its place. Returns the bytes of each rank's part. Not collective."""
        own = [buffer for buffer in self._buffers if buffer.keeps]
        rest = [buffer for buffer in self._buffers if not buffer.keeps]
        sharers = [[buffer] for buffer in (*own, *rest[:1])]
        sharers += [rest[1 + turn :: IN_TURN] for turn in range(IN_TURN)]
        for buffers in sharers:
            place = self._append(buffers)
            for buffer in buffers:
                buffer.place = place
        if rest:
            self._spare = self._append(rest)
        return sum(place.nbytes for place in self._places)

    def _append(self, buffers: Sequence[GradientBuffer]) -> BufferPlace:
        start = sum(place.nbytes for place in self._places)
        nbytes = max((padded(buffer.nbytes, PAGE) for buffer in buffers), default=0)
        place = BufferPlace(start, nbytes, is_kept=any(buffer.keeps for buffer in buffers))
        self._places.append(place)
        return place

    def open(
        self, parts: Sequence[Tensor], claim: Callable[[int, int], None] | None = None
    ) -> None:
        """Use memory of the node from now on. Not collective.

        The places begin at the start of each of ``parts``, (nbytes,) uint8 of every rank of the node. ``claim`` has
        memory behind bytes of this rank's part, given the first and the last; None where it is there.
        """
        self._parts, self._claim = parts, claim
        start = parts[self._rank].data_ptr()
        self._by_address = {start + place.start: place for place in self._places if place.nbytes}
        for place in self._places if claim is None else ():  # the spare one too, used or not
            if not place.is_kept:
                self.memory.add("exchange", place.nbytes)
            place.claimed = place.nbytes

    def close(self) -> None:
        """Stop to point into memory of the node. Not collective."""
        self._parts, self._claim = (), None
        for buffer in self._buffers:
            buffer.tensor = torch.empty(0, dtype=buffer.tensor.dtype, device=self.device)

    def view(self, place: BufferPlace, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of ``dtype`` in this rank's ``place``; no copy."""
        return self._view_of(self._rank, place.start, numel, dtype)

    def _view_of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._parts[rank][start : start + numel * dtype.itemsize].view(dtype)

    def take(self, place: BufferPlace, nbytes: int) -> None:
        """Hold ``place`` and have memory behind it. Its last readers have read it on return."""
        if place.claimed < nbytes:
            assert self._claim is not None, "else all is claimed"
            self._claim(place.start, place.start + nbytes)
            if not place.is_kept:
                self.memory.add("exchange", nbytes - place.claimed)
            place.claimed = nbytes
        self._wait_until_read(place.reduction)
        place.taken = True

    def fits(self, full: Tensor) -> bool:
        """Whether peers can see ``full``. Not collective, but the same on all ranks for the same size."""
        if self._spare is None:
            return full.data_ptr() in self._by_address
        return full.numel() * full.element_size() <= self._spare.nbytes

    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        """Context: ``Parts`` of every rank's ``full``, which fits into one place."""
        self._reductions = number = self._reductions + 1
        self._wait_until_read(number - LOCATIONS)  # the number before in the same column
        location = self._locate(full, number)
        if not self._tells_late:
            self._tell(number, location)
        return self._reading(number, location, full.numel(), full.dtype)

    def _locate(self, full: Tensor, reduction: int) -> int:
        """Byte in this rank's part where the node finds ``full``, which is moved to the spare place if necessary."""
        place = self._by_address.get(full.data_ptr())
        if place is not None:
            place.reduction = reduction
            return place.start
        spare = self._spare
        assert spare is not None, "fits"
        self.take(spare, full.numel() * full.element_size())
        self.view(spare, full.numel(), full.dtype).copy_(full)
        spare.taken, spare.reduction = False, reduction
        return spare.start

    def _tell(self, number: int, location: int) -> None:
        counters = self._level.counters
        assert counters is not None, "settled"
        self._level.accelerator.finish()
        counters.publish(LOCATION + number % LOCATIONS, location)
        counters.publish(READY, number)

    @contextmanager
    def _reading(
        self, number: int, location: int, numel: int, dtype: torch.dtype
    ) -> Iterator[Parts]:
        counters = self._level.counters
        assert counters is not None, "settled"
        if self._tells_late:
            self._tell(number, location)
        counters.wait(READY, number)
        column = LOCATION + number % LOCATIONS
        peers = [
            self._view_of(rank, counters.read(rank, column), numel, dtype)
            for rank in range(len(self._parts))
        ]

        def parts(start: int, count: int) -> list[Tensor]:
            return [peer[start : start + count] for peer in peers]

        yield parts
        self._level.accelerator.finish()
        counters.publish(READ, number)

    def _wait_until_read(self, reduction: int) -> None:
        counters = self._level.counters
        if counters is not None:
            self._level.wait_until(
                lambda: counters.reached(READ, reduction),
                f"waiting for peers to read gradient {reduction}",
            )


class Ipc(SharedLevel):
    """Ranks of one node that read each other's device memory."""

    title = "peers' memory"

    def __init__(self, transport: Collectives, messages: NodeLevel, *, overlap: bool) -> None:
        """Not collective. Arguments as of ``SharedLevel``; ranks of a node may share one device."""
        super().__init__(transport, messages, overlap=overlap, tells_late=overlap)
        self._part_nbytes: list[int] = []
        self._place_nbytes = 0
        self._first_place = 0
        self._blocks: PeerBlocks | None = None

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        if use is Use.GATHER:
            self._part_nbytes.append(numel * dtype.itemsize // self.comm.size)
        return super().allocate(numel, dtype, category=category, use=use, keep=keep)

    @override
    def settle(self) -> None:
        """Export this rank's block and map those of its peers. Collective over the group. Raises as ``PeerBlocks``."""
        places = pulled_nbytes(self._part_nbytes)
        self._place_nbytes = places // PULLED_IN_TURN
        self._first_place = padded(self._gradients.lay_out(), PLACE_ALIGNMENT)
        nbytes = self._first_place + places
        self._blocks = PeerBlocks(self.group, self.comm, self.accelerator, nbytes)
        self.memory.add("exchange", places)
        self.counters = Counters(self.comm, COLUMNS, naps=self._overlap)
        self._gradients.open(self._blocks.parts)

    @override
    def _shares_whole(self, full: Tensor) -> bool:
        nbytes = full.numel() * full.element_size() // self.comm.size
        return 0 < nbytes <= self._place_nbytes

    @override
    def _spread(self, full: Tensor, number: int, counters: Counters) -> Callable[[], None] | None:
        """Copy peers' parts out of their memory ([Note: One copy more])."""
        assert self._blocks is not None, "settled"
        comm, parts = self.comm, self._blocks.parts
        flat = full.view(torch.uint8)
        nbytes = len(flat) // comm.size
        start = self._first_place + number % PULLED_IN_TURN * self._place_nbytes
        place = slice(start, start + nbytes)
        parts[comm.rank][place].copy_(flat[comm.rank * nbytes :][:nbytes])
        self.accelerator.finish()
        counters.publish(GATHERED, number)
        for distance in range(1, comm.size):  # not everybody from the same peer at once
            peer = (comm.rank + distance) % comm.size
            counters.wait_for(peer, GATHERED, number)
            flat[peer * nbytes :][:nbytes].copy_(parts[peer][place], non_blocking=True)
        self.accelerator.finish()
        return None

    @override
    def close(self) -> None:
        super().close()
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
