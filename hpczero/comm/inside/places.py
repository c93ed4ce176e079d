"""Where a rank's gradients lie so that its node can read them.

Owns: this rank's part of the ground, its places and who holds them. Must not know: what kind of memory the ground is,
reductions, units. It knows other ranks' progress only through ``wait_until_read``.

[Note: Places]
Most gradients live from a unit's backward to its reduction, so two places serve all units in turn. The buffer that was
asked for first has a place of its own. It is the root unit's, whose first gradient comes early and whose last comes
late. Backward may reach units in another order than they are reduced, and a unit may then find its place taken. Its
gradient goes to private memory and moves to the spare place when its turn has come. Gradients that are kept (stage 1)
have a place each. ``Plan.memory`` counts by the same rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.inside.segment import PAGE
from hpczero.memory.buffers import CPU, Buffer, Memory, lasting

IN_TURN = 2


class Ground(ABC):
    """Memory that every rank of a node has a part of, and in which every rank reads all parts.

    Attributes:
        is_whole: whether all of it has memory behind it from the start.
    """

    is_whole: ClassVar[bool] = False

    @abstractmethod
    def part(self, rank: int) -> Tensor:
        """(nbytes,) uint8 of local rank ``rank``."""

    def claim(self, start: int, stop: int) -> None:
        """Have memory behind these bytes of this rank's part.

        Raises:
            CommError: there is none left.
        """
        return


class Place:
    """Some bytes of this rank's part that one gradient at a time may hold.

    Attributes:
        start: first byte in this rank's part of the ground.
        nbytes: number of bytes.
        claimed: number of these bytes that have memory behind them.
        is_kept: whether it belongs to a gradient that is kept; its bytes are counted there.
        taken: whether a gradient holds it.
        reduction: number of the last reduction that read it.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.claimed = 0
        self.is_kept = False
        self.taken = False
        self.reduction = 0


class GradientBuffer(Buffer):
    """One unit's local gradient. It lies in a place if it has one that is free, in private memory otherwise."""

    def __init__(
        self,
        places: Places,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
        keep: bool,
    ) -> None:
        self.tensor = lasting(0, dtype, places.device)
        self.place: Place | None = None
        self.keeps = keep
        self._places = places
        self._numel = numel
        self._dtype = dtype
        self._nbytes = numel * dtype.itemsize
        self._memory = memory
        self._category = category
        self._held = False
        self._in_place = False
        if keep:
            memory.add(category, self._nbytes)

    def take(self) -> None:
        """Take the memory. Waits until a place that was read before may be written again."""
        if self._held:
            return
        self._in_place = self.place is not None and not self.place.taken
        if self._in_place:
            assert self.place is not None, "it is in a place"
            self._places.take(self.place, self._nbytes)
            self.tensor = self._places.view(self.place, self._numel, self._dtype)
        else:
            self.tensor = lasting(self._numel, self._dtype, self._places.device)
            self._memory.add(self._category, self._nbytes)
        self._held = True

    @override
    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        if self._in_place:
            assert self.place is not None, "taken"
            self.place.taken = False
        else:
            self._memory.add(self._category, -self._nbytes)
        self.tensor = lasting(0, self._dtype, self._places.device)


class Places:
    """This rank's part of one ground, laid out once all gradient buffers are known.

    Attributes:
        nbytes: bytes of each rank's part.
        device: device of gradients that have no place.
    """

    def __init__(
        self,
        rank: int,
        memory: Memory,
        *,
        wait_until_read: Callable[[int], None],
        device: torch.device = CPU,
    ) -> None:
        """Not collective.

        Args:
            rank: local rank.
            memory: ledger of buffers. Places that are not kept count as ``exchange`` from their first use, or from
                the start where the ground is whole.
            wait_until_read: returns when all ranks of the node have read what they need of a reduction.
            device: device of the ground.
        """
        self.nbytes = 0
        self.device = device
        self._ground: Ground | None = None
        self._rank = rank
        self._memory = memory
        self._wait_until_read = wait_until_read
        self._buffers: list[GradientBuffer] = []
        self._places: list[Place] = []
        self._spare: Place | None = None
        self._by_address: dict[int, Place] = {}

    def allocate(self, numel: int, dtype: torch.dtype, *, category: str, keep: bool) -> Buffer:
        """A buffer whose memory comes later. Equal on all ranks of the node.

        One that is asked for when all places are laid out has none.
        """
        if self._ground is not None and keep:
            return Buffer(
                numel, dtype, memory=self._memory, category=category, keep=True, device=self.device
            )
        buffer = GradientBuffer(
            self, numel, dtype, memory=self._memory, category=category, keep=keep
        )
        self._buffers.append(buffer)
        return buffer

    def lay_out(self) -> int:
        """Give every buffer its place. Returns the bytes of each rank's part."""
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
        return self.nbytes

    def _append(self, buffers: Sequence[GradientBuffer]) -> Place:
        place = Place(self.nbytes, max((_pages(b.nbytes) for b in buffers), default=0))
        place.is_kept = any(buffer.keeps for buffer in buffers)
        self._places.append(place)
        self.nbytes += place.nbytes
        return place

    def open(self, ground: Ground) -> None:
        """Use ``ground``. The places begin at the start of its parts; it has ``nbytes`` for each rank of the node."""
        self._ground = ground
        start = ground.part(self._rank).data_ptr()
        self._by_address = {start + place.start: place for place in self._places if place.nbytes}
        for place in self._places if ground.is_whole else ():  # the spare one too, used or not
            if not place.is_kept:
                self._memory.add("exchange", place.nbytes)
            place.claimed = place.nbytes

    def close(self) -> None:
        """Stop to point into the ground."""
        self._ground = None
        for buffer in self._buffers:
            buffer.tensor = torch.empty(0, dtype=buffer.tensor.dtype, device=self.device)

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of ``dtype`` in this rank's ``place``; no copy."""
        return self.view_of(self._rank, place.start, numel, dtype)

    def view_of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of ``dtype`` in the part of local rank ``rank``, from byte ``start`` on; no copy."""
        assert self._ground is not None, "laid out"
        return self._ground.part(rank)[start : start + numel * dtype.itemsize].view(dtype)

    def take(self, place: Place, nbytes: int) -> None:
        """Hold ``place`` and have memory behind it. Its last readers have read it on return."""
        assert self._ground is not None, "laid out"
        if place.claimed < nbytes:
            self._ground.claim(place.start, place.start + nbytes)
            if not place.is_kept:
                self._memory.add("exchange", nbytes - place.claimed)
            place.claimed = nbytes
        self._wait_until_read(place.reduction)
        place.taken = True

    def fits(self, full: Tensor) -> bool:
        """Whether ``locate`` can make ``full`` visible. Ranks that ask for the same size get the same answer."""
        if self._spare is None:
            return full.data_ptr() in self._by_address
        return full.numel() * full.element_size() <= self._spare.nbytes

    def locate(self, full: Tensor, reduction: int) -> int:
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


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
