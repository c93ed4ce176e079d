"""Tiers in memory of the host: staged on a device, or worked on in place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.errors import TierError
from hpczero.files.direct import PAGE
from hpczero.memory.pages import device_pages, host_pages, padded
from hpczero.tier.base import Fetch, Staged
from hpczero.tier.lanes import Place, Record, Transfer
from hpczero.tier.staged import StagedTier, Staging

# Torch rounds each piece of pinned memory up to a power of two: with the page that alignment may take, this is one.
SLAB_NBYTES = 32 * 2**20 - PAGE
COPY_NBYTES = 16 * 2**20
LANES = 2  # one for each way


class HostTier(StagedTier):
    """Memory of the host, pinned where there is a device. Staging lies on the device."""

    def __init__(
        self,
        *,
        blocks: int,
        block_nbytes: int,
        accelerator: Accelerator | None = None,
        lanes: int = LANES,
    ) -> None:
        """Makes ``blocks`` of staging, for ``block_nbytes`` bytes of parts each; ``lanes`` copies are in flight.

        Raises:
            ConfigError: no blocks.
            OutOfMemory: they do not fit.
        """
        accelerator = accelerator or HostAccelerator()
        memory = partial(device_pages, accelerator=accelerator)
        staging = Staging(blocks, block_nbytes, alignment=PAGE, memory=memory)
        super().__init__(staging, accelerator=accelerator, lanes=lanes, call_nbytes=COPY_NBYTES)
        self._slabs: list[Tensor] = []
        self._in, self._out = accelerator.lane(), accelerator.lane()

    @override
    def describe(self) -> str:
        kind = "memory" if self._accelerator.is_host else "pinned memory"
        return f"{kind} of the host, staged on {self._accelerator.device}"

    @override
    def _make_room(self, begin: int, end: int) -> None:
        while len(self._slabs) * SLAB_NBYTES < end:
            self._add_slab(SLAB_NBYTES, begin, asked=end - begin)

    def _add_slab(self, nbytes: int, begin: int, *, asked: int) -> None:
        try:
            self._slabs.append(host_pages(nbytes, PAGE, self._accelerator))
        except MemoryError as error:
            raise TierError(
                f"host tier: got a request for {asked:,} bytes beyond {begin:,}, and the host has no more ({error}); "
                "let less rest there, use fewer ranks on this node, or let it rest on disk"
            ) from error

    @override
    def _read(self, into: Tensor, offset: int) -> None:
        for slab, piece in self._cut(into, offset):
            self._in.copy(piece, slab)
        self._in.mark().wait()

    @override
    def _write(self, source: Tensor, offset: int) -> None:
        for slab, piece in self._cut(source, offset):
            self._out.copy(slab, piece)
        self._out.mark().wait()

    @override
    def _release(self) -> None:
        self._slabs.clear()

    def _cut(self, memory: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Where ``memory`` lies from ``offset`` on, slab by slab, and its part that lies there."""
        done = 0
        while done < memory.numel():
            index, at = divmod(offset + done, SLAB_NBYTES)
            count = min(SLAB_NBYTES - at, memory.numel() - done)
            yield self._slabs[index][at : at + count], memory[done : done + count]
            done += count


# The host tier whose records the host computes on where they rest.
#
#     opening = tier.open(place, ["values"], fresh=["state"])   # behind what was started before; nothing moves
#     parts = opening.wait()                                    # the resting memory itself
#     tier.evict(parts, ["values", "state"])                    # ends the work; copies that were started since go on
#
# [Note: Work in place]
# From ``open`` on, copies of that place wait until the work has ended, as if it were a write: a gradient that comes
# down meanwhile does not overwrite the one that is being read. Work begins when all copies that were started before it
# have ended. It waits for no copy that comes later, so nobody waits in a circle.

RECORDS = 8  # of a slab at least, so that its end, where none fits any more, is little


class InPlace(Staged):
    """Parts of a record where they rest; see [Note: Work in place]."""

    in_place = True

    def __init__(self, place: Place, parts: dict[str, Tensor], work: Transfer) -> None:
        """``work``: of one piece, which ends with ``end``."""
        super().__init__(place, parts)
        self._work = work

    def end(self) -> Transfer:
        """The work has ended, and copies of this place go on; any thread, twice is harmless."""
        with suppress(InvalidStateError):
            self._work.pieces[0].set_result(None)
        return self._work


class Opening(Fetch):
    """Work on a record that begins when earlier copies have ended."""

    def __init__(
        self, name: str, staged: InPlace, earlier: set[Transfer], reads: set[Transfer]
    ) -> None:
        """``earlier``: copies to it that must have succeeded; ``reads``: copies from it."""
        self.name = name
        self._staged, self._earlier, self._reads = staged, earlier, reads

    @override
    def wait(self) -> InPlace:
        for copy in self._earlier | self._reads:
            copy.settle()
        try:
            for copy in self._earlier:
                copy.check()
        except TierError:
            self._staged.end()
            raise
        return self._staged

    def end(self) -> None:
        """As of ``InPlace``; also where it was never waited for."""
        self._staged.end()


class InPlaceTier(HostTier):
    """As of any host tier; besides, records can be opened."""

    def __init__(
        self, *, blocks: int, block_nbytes: int, accelerator: Accelerator | None = None
    ) -> None:
        super().__init__(blocks=blocks, block_nbytes=block_nbytes, accelerator=accelerator)
        self._begins: list[int] = []  # of each slab
        self._capacity = 0

    @override
    def describe(self) -> str:
        return f"{super().describe()}; the host steps on it there"

    def open(self, place: Place, parts: Iterable[str], *, fresh: Iterable[str] = ()) -> Opening:
        """Work on ``parts`` where they rest, once it is waited for; what is waited for is evicted.

        Args:
            place: of this tier.
            parts: with content.
            fresh: parts beside them whose content is undefined.

        Raises:
            TierError: a part was never evicted, or was taken fresh since.
        """
        what = f"opening of {place.record.name!r}"
        known, new = self._checked(place, parts, fresh, what)
        place.known -= new.keys()
        sizes = place.sizes([*known, *new])
        earlier = {place.writes[part] for part in sizes if part in place.writes}
        work = Transfer(what, [Future()])
        place.writes.update(dict.fromkeys(sizes, work))
        memory = {part: self._at(place.offsets[part], nbytes) for part, nbytes in sizes.items()}
        return Opening(what, InPlace(place, memory, work), earlier, set(place.reads))

    @override
    def _reserve(self, record: Record) -> Place:
        nbytes = sum(padded(part, PAGE) for part in record.parts.values())
        begin, _ = self._room.find(nbytes, self._end)
        if begin + nbytes > self._capacity:
            # A page that no slab has lies between two of them: no free stretch goes from one to the next.
            self._end = self._capacity + PAGE
        return super()._reserve(record)

    @override
    def _make_room(self, begin: int, end: int) -> None:
        if end <= self._capacity:
            return
        # Torch rounds each piece of pinned memory up to a power of two: with the page of alignment, this is one.
        nbytes = max(SLAB_NBYTES, (1 << (RECORDS * (end - begin)).bit_length()) - PAGE)
        self._add_slab(nbytes, begin, asked=nbytes)
        self._begins.append(begin)
        self._capacity = begin + nbytes

    @override
    def _evict(self, staged: Staged, written: Mapping[str, int]) -> Transfer:
        if not isinstance(staged, InPlace):
            return super()._evict(staged, written)
        staged.surrender()
        return staged.end()

    @override
    def _cut(self, memory: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._at(offset, memory.numel()), memory

    def _at(self, offset: int, nbytes: int) -> Tensor:
        """(nbytes,) uint8 of one record; a record lies in one slab."""
        if not nbytes:
            # It may lie where no slab begins.
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        slab = bisect_right(self._begins, offset) - 1
        begin = offset - self._begins[slab]
        return self._slabs[slab][begin : begin + nbytes]
