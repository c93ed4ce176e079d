"""Held: what this rank holds of one dataset, in the order of the file, wherever it rests.

Owns: which elements are where, and windows of a tier of which only some elements have passed yet. Must not know: files,
ranks, rounds. Nothing here is collective.

    held   [ piece | piece | piece ... ]   a piece is this rank's part of one parameter
    held[a:b]    [------------]            touches the pieces below, and what rests elsewhere in whole windows

[Note: Open windows]
A tier moves whole windows, and slices end anywhere. Every element passes once. A window stays in memory from its first
element to its last, and so moves once. Slices run through the file at as many places as there are ranks, so about as
many windows are open. Beyond ``OPEN_NBYTES`` the one opened last is closed, and moves again when it is needed. The
places take turns, so the one opened first is needed next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero.zero.units.away import AwayRest
from hpczero.zero.units.away_shard import VALUES, AwayShard
from hpczero.zero.units.unit import Unit

OPEN_NBYTES = 64 * 2**20  # of windows in memory; see [Note: Open windows]


class Held(Protocol):
    """Elements of one dataset; a flat tensor is one too."""

    def __getitem__(self, part: slice, /) -> Tensor:
        """(elements of ``part``,), which nobody changes before the next call.

        Raises:
            TierError: they rest on a tier that cannot read them.
        """
        ...


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter: neighbours in the file and in its unit.

    Attributes:
        start: place of its first element in the file.
        unit: that has it.
        position: slot in the unit.
        begin: place of its first element in the ``owned_values`` of the unit.
        numel: elements.
    """

    start: int
    unit: Unit
    position: int
    begin: int
    numel: int


class Home(Protocol):
    """Where one kind of elements, values or a state of the optimizer, rests; ``begin`` counts in the unit."""

    def read(self, piece: Piece, begin: int, into: Tensor) -> None:
        """Copy elements of ``piece`` from ``begin`` on to ``into``."""
        ...

    def write(self, piece: Piece, begin: int, values: Tensor) -> None:
        """Replace elements of ``piece`` from ``begin`` on by ``values``."""
        ...


class HeldPieces:
    """Elements of pieces, one piece after the other. Each element is read once, or written once."""

    def __init__(self, pieces: Sequence[Piece], home: Home) -> None:
        """``pieces``: in the order of the elements."""
        self._pieces, self._home = pieces, home
        self._ends = list(accumulate(piece.numel for piece in pieces))

    def __getitem__(self, part: slice, /) -> Tensor:
        """(elements of ``part``,) fp32 copy on the host."""
        found = torch.empty(part.stop - part.start)
        for piece, begin, inside in self._touched(part):
            self._home.read(piece, begin, found[inside])
        return found

    def __setitem__(self, part: slice, values: Tensor, /) -> None:
        """Put ``values``, (elements of ``part``,), where they rest; a tier may have them only after the last part.

        Raises:
            TierError: a tier cannot take them.
        """
        for piece, begin, inside in self._touched(part):
            self._home.write(piece, begin, values[inside])

    def _touched(self, part: slice) -> Iterator[tuple[Piece, int, slice]]:
        """Each piece with elements in ``part``: the first of them, counted in the unit, and their place in ``part``."""
        index, at = bisect_right(self._ends, part.start), part.start
        while at < part.stop:
            piece, end = self._pieces[index], self._ends[index]
            stop = min(end, part.stop)
            begin = piece.begin + piece.numel - (end - at)
            yield piece, begin, slice(at - part.start, stop - part.start)
            index, at = index + 1, stop


class ValuesHome:
    """Values of parameters."""

    def __init__(self) -> None:
        self._windows = OpenWindows(VALUES)

    def read(self, piece: Piece, begin: int, into: Tensor) -> None:
        """As of any home."""
        rest = piece.unit.rest
        if isinstance(rest, AwayRest):
            self._windows.read(rest.shard, piece.unit.owned_numel, begin, into)
            return
        with piece.unit.owned_values() as values, torch.no_grad():
            into.copy_(values[begin : begin + len(into)])

    def write(self, piece: Piece, begin: int, values: Tensor) -> None:
        """As of any home; ``unit.publish`` follows once all are there."""
        rest = piece.unit.rest
        if isinstance(rest, AwayRest):
            rest.updated(range(begin, begin + len(values)), values)
            self._windows.write(rest.shard, piece.unit.owned_numel, begin, values)
            return
        with piece.unit.owned_values(changes=True) as here, torch.no_grad():
            here[begin : begin + len(values)].copy_(values)


class StateHome:
    """One state of the optimizer that is there for every element; zero where there is none yet."""

    def __init__(self, key: str, state_of: Callable[[Piece], MutableMapping[Any, Any]]) -> None:
        """``state_of``: what of the state of a piece is in memory."""
        self._key, self._state_of = key, state_of
        self._windows = OpenWindows(key)

    def read(self, piece: Piece, begin: int, into: Tensor) -> None:
        """As of any home."""
        if piece.unit.away is not None:
            self._windows.read(piece.unit.away, piece.unit.owned_numel, begin, into)
            if self._key not in self._state_of(piece):
                into.zero_()  # left on the tier by a state that was cleared since
            return
        value = self._state_of(piece).get(self._key)
        if value is None:
            into.zero_()
            return
        first = begin - piece.begin
        into.copy_(value.detach().reshape(-1)[first : first + len(into)])

    def write(self, piece: Piece, begin: int, values: Tensor) -> None:
        """As of any home; in memory the state is made, zero at first."""
        if piece.unit.away is not None:
            self._windows.write(piece.unit.away, piece.unit.owned_numel, begin, values)
            return
        state = self._state_of(piece)
        if self._key not in state:
            device = piece.unit.optimized.master.device
            state[self._key] = torch.zeros(piece.numel, device=device)
        first = begin - piece.begin
        state[self._key][first : first + len(values)].copy_(values)


class OpenWindows:
    """Windows of one part on the tier of which some elements have passed. See [Note: Open windows]."""

    def __init__(self, part: str) -> None:
        """``part``: of the records of the tier."""
        self._part = part
        self._open: dict[tuple[AwayShard, int], _Window] = {}
        self._left: dict[tuple[AwayShard, int], int] = {}  # elements that have not passed

    def read(self, shard: AwayShard, owned: int, begin: int, into: Tensor) -> None:
        """Copy elements of ``shard`` from ``begin`` on to ``into``; ``owned`` of the shard are no padding.

        Raises:
            TierError: they cannot be read.
        """
        for index, inside, at in _spans(shard, begin, len(into)):
            if at.stop < len(into) and (shard, index + 1) not in self._open:
                shard.start_window(index + 1, self._part)
            window = self._open.get((shard, index))
            if window is None:
                self._make_room(shard, index)
                window = _Window(shard.read_window(index, self._part), changed=False)
            into[at] = window.values[inside]
            self._passed(shard, index, owned, window, len(into[at]))

    def write(self, shard: AwayShard, owned: int, begin: int, values: Tensor) -> None:
        """As ``read``, the other way; what a window held before is not looked at."""
        for index, inside, at in _spans(shard, begin, len(values)):
            key = shard, index
            window = self._open.get(key)
            if window is None:
                self._make_room(shard, index)
                begun = key in self._left
                new = shard.read_window(index, self._part) if begun else None
                window = _Window(torch.zeros(len(shard.windows[index])) if new is None else new)
            window.values[inside] = values[at]
            self._passed(shard, index, owned, window, len(values[at]))

    def _passed(
        self, shard: AwayShard, index: int, owned: int, window: _Window, count: int
    ) -> None:
        key, elements = (shard, index), shard.windows[index]
        left = self._left.get(key, min(elements.stop, owned) - elements.start) - count
        if left:
            self._left[key], self._open[key] = left, window
            return
        self._left.pop(key, None)
        self._open.pop(key, None)
        self._close(shard, index, window)

    def _make_room(self, shard: AwayShard, index: int) -> None:
        new = len(shard.windows[index]) * torch.float32.itemsize
        while self._open and new + sum(w.values.nbytes for w in self._open.values()) > OPEN_NBYTES:
            (other, place), window = self._open.popitem()
            self._close(other, place, window)

    def _close(self, shard: AwayShard, index: int, window: _Window) -> None:
        if window.changed:
            shard.write_window(index, self._part, window.values)


@dataclass(frozen=True)
class _Window:
    """Elements of a window in memory, padding included; whether the tier has others."""

    values: Tensor
    changed: bool = True


def _spans(shard: AwayShard, begin: int, numel: int) -> Iterator[tuple[int, slice, slice]]:
    """Each window with some of ``numel`` elements from ``begin`` on: its index, where they are in it, and which."""
    index, at = shard.window_of(begin), begin
    while at < begin + numel:
        window = shard.windows[index]
        stop = min(window.stop, begin + numel)
        yield index, slice(at - window.start, stop - window.start), slice(at - begin, stop - begin)
        index, at = index + 1, stop
