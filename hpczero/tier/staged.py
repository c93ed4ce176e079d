"""StagedTier: what all tiers have in common whose shards travel through staging blocks.

A medium says how some bytes at an offset are read and written, on any thread; see ``disk`` and ``host``.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Mark
from hpczero.errors import ConfigError, OutOfMemory, TierError
from hpczero.memory.pages import padded
from hpczero.tier.base import Fetch, Staged, Tier
from hpczero.tier.lanes import MOST_PARTS, Lanes, Place, Record, Transfer

# Room of a tier that was given back: which of it the next record gets.
#
# The first stretch that is long enough is taken, the lowest first. What is kept in the order in which it is needed, and
# given back in the other, as activations are, leaves no gaps.


@dataclass(order=True)
class _Stretch:
    begin: int
    end: int
    before: frozenset[Transfer] = field(compare=False)


class FreeRoom:
    """Stretches of a flat space that nobody uses, none beside another."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(each.end - each.begin for each in self._stretches)

    def find(self, nbytes: int, end: int) -> tuple[int, frozenset[Transfer]]:
        """Where ``nbytes`` may lie, and what has to end there before something is written; takes nothing.

        What lies beyond ``end`` of the space is made when it is needed.
        """
        if not nbytes:
            return end, frozenset()
        for each in self._stretches:
            if each.end - each.begin >= nbytes or each.end == end:
                return each.begin, frozenset(t for t in each.before if not t.has_ended)
        return end, frozenset()

    def take(self, begin: int, end: int) -> None:
        """``begin`` to ``end`` is used, as ``find`` has given it."""
        for index, each in enumerate(self._stretches):
            if each.begin == begin < end:
                each.begin = min(end, each.end)
                if each.begin == each.end:
                    del self._stretches[index]
                return

    def put(self, begin: int, end: int, before: Iterable[Transfer]) -> None:
        """``begin`` to ``end`` is free, once ``before`` have ended."""
        if begin == end:
            return
        insort(self._stretches, _Stretch(begin, end, frozenset(before)))
        joined: list[_Stretch] = []
        for each in self._stretches:
            if joined and joined[-1].end == each.begin:
                joined[-1] = _Stretch(joined[-1].begin, each.end, joined[-1].before | each.before)
            else:
                joined.append(each)
        self._stretches = joined


# Staging: all memory that passes through a tier, as equal blocks that are made once.
#
# Constant buffers, and no fragmentation: C_B and M_D of Rajbhandari et al., ZeRO, SC20, sec. 6. One thread at a time.


class StagingBlock:
    """One block.

    Attributes:
        memory: (capacity,) uint8, aligned.
        holder: who has it, for messages.
        read_until: what the device has started with its bytes; whoever writes to it waits for that first.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.holder = ""
        self.read_until: Mark | None = None

    def when_free(self) -> None:
        """Return when the device no longer works with what lay here before."""
        if self.read_until is not None:
            self.read_until.wait()


class Staging:
    """A fixed count of equal blocks."""

    def __init__(
        self, count: int, block_nbytes: int, *, alignment: int, memory: Callable[[int, int], Tensor]
    ) -> None:
        """Make all blocks, for ``block_nbytes`` bytes of parts each; the ends of their pages come on top.

        ``memory`` makes (nbytes,) uint8 for all of them, from bytes and alignment.

        Raises:
            ConfigError: no block, or empty ones.
            OutOfMemory: they do not fit.
        """
        if count < 1 or block_nbytes < 1:
            raise ConfigError(
                f"staging: got {count} blocks of {block_nbytes:,} bytes, expected at least 1 of each"
            )
        self.alignment = alignment
        self.block_nbytes = block_nbytes
        capacity = padded(block_nbytes, alignment) + MOST_PARTS * alignment
        try:
            whole = memory(count * capacity, alignment)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(
                f"staging: {count} blocks of {capacity:,} bytes do not fit ({error}); take fewer or smaller ones"
            ) from error
        self.nbytes = count * capacity
        self._blocks = [StagingBlock(part) for part in torch.split(whole, capacity)]
        self._free = list(self._blocks)
        self._writing: deque[tuple[StagingBlock, Transfer]] = deque()

    def take(self, nbytes: int, holder: str) -> StagingBlock:
        """A block for ``nbytes`` bytes of parts, content undefined; waits for the oldest write if none is free.

        Raises:
            TierError: a block is smaller; or all are held and none is being written, so that waiting would never end.
        """
        if nbytes > self.block_nbytes:
            raise TierError(
                f"{holder}: got {nbytes:,} bytes to stage at once, and a block of staging has {self.block_nbytes:,}; "
                "stage fewer parts at a time, cut the record into smaller ones, or make larger blocks"
            )
        if not self._free:
            if not self._writing:
                raise TierError(
                    f"{holder}: all {len(self._blocks)} blocks of staging are held ("
                    f"{'; '.join(block.holder for block in self._blocks)}) and none is on its way out; evict one "
                    "first, or make more blocks"
                )
            block, transfer = self._writing.popleft()
            transfer.settle()  # an error is told to whoever waits for it
            self._free.append(block)
        block = self._free.pop()
        block.holder = holder
        return block

    def give_back(self, block: StagingBlock, *, read_until: Mark | None = None) -> None:
        """The block is free, as soon as ``read_until`` has passed."""
        block.read_until = read_until
        self._free.append(block)

    def give_back_after(self, block: StagingBlock, transfer: Transfer) -> None:
        """The block is free when it is written."""
        block.read_until = None
        block.holder = transfer.name
        self._writing.append((block, transfer))


CALL_NBYTES = 4 * 2**20  # of one call to the medium
LANES = 4


class _InBlock(Staged):
    """Parts end to end in one block, each from a page on."""

    def __init__(
        self, place: Place, block: StagingBlock, sizes: Mapping[str, int], alignment: int
    ) -> None:
        self.block = block
        self.begins: dict[str, int] = {}
        begin = 0
        for part, nbytes in sizes.items():
            self.begins[part] = begin
            begin += padded(nbytes, alignment)
        parts = {part: block.memory[at : at + sizes[part]] for part, at in self.begins.items()}
        super().__init__(place, parts)


class _StagedRead(Fetch):
    """Its block goes back if the read fails."""

    def __init__(self, transfer: Transfer, staged: _InBlock, staging: Staging) -> None:
        self.name = transfer.name
        self._transfer = transfer
        self._staged = staged
        self._staging = staging

    @override
    def wait(self) -> Staged:
        try:
            self._transfer.wait()
            self._staged.block.when_free()  # fresh parts alone wait for nothing else
        except TierError:
            if self._staged.held:
                self._staged.surrender()
                self._staging.give_back(self._staged.block)
            raise
        finally:
            self._staged.place.reads.discard(self._transfer)
        return self._staged


class StagedTier(Tier):
    """A flat space of bytes on some medium, moved by lanes through staging.

    A subclass writes ``describe``, ``_make_room``, ``_read`` and ``_write``, and ``_release`` where the medium is to be
    given back.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        accelerator: Accelerator,
        lanes: int = LANES,
        call_nbytes: int = CALL_NBYTES,
    ) -> None:
        """Starts ``lanes`` threads, whose calls to the medium have ``call_nbytes`` at most.

        Raises:
            ConfigError: no lane, or empty calls.
        """
        super().__init__()
        self._staging = staging
        self._accelerator = accelerator
        self._call_nbytes = padded(call_nbytes, staging.alignment)
        self._end = 0
        self._room = FreeRoom()
        if lanes < 1 or call_nbytes < 1:
            raise ConfigError(
                f"tier: got {lanes} lanes with calls of {call_nbytes:,} bytes, expected at least 1"
            )
        self._lanes = Lanes(lanes, enter=accelerator.enter_thread)

    # --- what a medium writes

    @abstractmethod
    def _make_room(self, begin: int, end: int) -> None:
        """Make sure that bytes ``begin`` to ``end`` have room; ``begin`` is where the last call ended.

        Raises:
            TierError: they have none.
        """

    @abstractmethod
    def _read(self, into: Tensor, offset: int) -> None:
        """Fill ``into`` with the bytes at ``offset``; on a lane. Both are aligned, and so is the number of bytes.

        Raises:
            TierError: names offset, bytes got and expected, and what the system said.
        """

    @abstractmethod
    def _write(self, source: Tensor, offset: int) -> None:
        """As ``_read``, the other way."""

    def _release(self) -> None:
        """Give the medium back; nothing runs any more."""
        return

    # --- the contract

    @property
    @override
    def staging_nbytes(self) -> int:
        return self._staging.nbytes

    @override
    def _reserve(self, record: Record) -> Place:
        alignment = self._staging.alignment
        nbytes = sum(padded(part, alignment) for part in record.parts.values())
        begin, before = self._room.find(nbytes, self._end)
        place = Place(record, begin, alignment, before)
        if place.end > self._end:
            self._make_room(self._end, place.end)
            self._end = place.end
        self._room.take(place.begin, place.end)
        return place

    @override
    def _release_room(self, place: Place) -> None:
        # Waits for nothing: whoever gets the room writes behind what is still under way there.
        self._room.put(
            place.begin, place.end, {*place.before, *place.reads, *place.writes.values()}
        )

    @override
    def _fetch(self, place: Place, read: Mapping[str, int], fresh: Mapping[str, int]) -> Fetch:
        name = f"fetch of {', '.join(read) or 'nothing'} of {place.record.name!r}"
        sizes = place.sizes([*read, *fresh])
        waited = partial(self.traffic.waited, sizes)
        began = time.perf_counter()
        block = self._staging.take(sum(sizes.values()), name)
        waited(time.perf_counter() - began)
        staged = _InBlock(place, block, sizes, self._staging.alignment)
        earlier = {place.writes[part] for part in read}

        def before() -> None:
            block.when_free()
            for write in earlier:
                write.settle()
                write.check()

        pieces = self._pieces(self._read, staged, read)
        transfer = self._lanes.start(name, pieces, before=before, waited=waited)
        place.reads.add(transfer)
        return _StagedRead(transfer, staged, self._staging)

    @override
    def _evict(self, staged: Staged, written: Mapping[str, int]) -> Transfer:
        assert isinstance(staged, _InBlock), "staged by this tier"
        place, name = staged.place, f"evict of {', '.join(written)} of {staged.place.record.name!r}"
        # Behind what the device has been given to do with the block: it may still write there, or read.
        mark = self._accelerator.mark()
        staged.surrender()
        pieces = self._pieces(self._write, staged, written)
        if not pieces:
            self._staging.give_back(staged.block, read_until=mark)
            transfer = Transfer(name)
            place.writes.update(dict.fromkeys(written, transfer))
            return transfer
        earlier = {place.writes[part] for part in written if part in place.writes}
        earlier |= place.reads | place.before

        def before() -> None:
            mark.wait()
            for transfer in earlier:
                transfer.settle()

        transfer = self._lanes.start(
            name, pieces, before=before, waited=partial(self.traffic.waited, written)
        )
        place.writes.update(dict.fromkeys(written, transfer))
        self._staging.give_back_after(staged.block, transfer)
        return transfer

    @override
    def _close(self) -> None:
        self._lanes.close()
        self._release()

    def _pieces(
        self, move: Callable[[Tensor, int], None], staged: _InBlock, sizes: Mapping[str, int]
    ) -> list[Callable[[], None]]:
        """One call to the medium each; the last of a part goes to the end of its page."""
        pieces: list[Callable[[], None]] = []
        for part, nbytes in sizes.items():
            begin, offset = staged.begins[part], staged.place.offsets[part]
            whole = padded(nbytes, self._staging.alignment)
            for at in range(0, whole, self._call_nbytes):
                stop = min(at + self._call_nbytes, whole)
                memory = staged.block.memory[begin + at : begin + stop]
                pieces.append(partial(move, memory, offset + at))
        return pieces
