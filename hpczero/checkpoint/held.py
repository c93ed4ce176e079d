"""What this rank holds of one dataset, in the order of the file, wherever it rests. Nothing here is collective.

    held   [ piece | piece | piece ... ]   a piece is this rank's part of one parameter
    held[a:b]    [------------]            touches the pieces below, and what rests elsewhere in whole windows

A part of a parameter may have padding in memory, which the file has not. It becomes zero with the elements before it.

[Note: Open windows]
A tier moves whole windows, and slices end anywhere. Every element passes once. A window stays in memory from its first
element to its last. About as many windows are open as there are ranks. Beyond ``OPEN_NBYTES`` the window opened last is
closed, and moves again when it is needed: the window opened first is needed next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.checkpoint.exchange import EvenRuns, StridedRange
from hpczero.errors import CheckpointError
from hpczero.plan.placement import Placement
from hpczero.zero.units.away import AwayRest
from hpczero.zero.units.away_shard import VALUES, AwayShard
from hpczero.zero.units.encoded import EncodedRest
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.coded import CodedState
from hpczero.zero.update.optimizer_state import AWAY

Scalar = int | float | bool


def kind_of(key: str, value: Any, numel: int, *, packed: bool = False) -> str | None:
    """``elements``, ``tensor:float32``, ``int`` ...; None for a state that does not exist yet.

    A ``packed`` state may have fewer than ``numel`` elements; the others are zero (``zero.update.whole_states``).

    Raises:
        CheckpointError: it is neither fp32 with the elements of its shard nor one number.
    """
    if value is None:
        return None
    if value is AWAY or isinstance(value, CodedState):
        return "elements"
    if isinstance(value, Tensor):
        if not value.dim():
            return f"tensor:{str(value.dtype).removeprefix('torch.')}"
        fits = value.numel() == numel or (packed and value.numel() < numel)
        if fits and value.dtype == torch.float32:
            return "elements"
        got = f"{tuple(value.shape)} {value.dtype}"
    else:
        if type(value) in (bool, int, float):
            return type(value).__name__
        got = type(value).__name__
    raise CheckpointError(
        f"optimizer state {key!r} is {got}, expected fp32 of the {numel} elements of its shard, or one number; such a "
        "state cannot be kept in a checkpoint"
    )


def scalar_of(kind: str, number: Scalar | None) -> Any:
    """The state of one value that ``scalars`` gave."""
    assert number is not None, "scalars are numbers"
    if kind.startswith("tensor:"):
        return torch.tensor(
            number, dtype=getattr(torch, kind.removeprefix("tensor:")), device="cpu"
        )
    return {"bool": bool, "int": int, "float": float}[kind](number)


OPEN_NBYTES = 64 * 2**20  # of windows in memory; see [Note: Open windows]


@dataclass(frozen=True)
class ParameterPiece:
    """This rank's part of one parameter, in the file and in its unit.

    Attributes:
        start: place of its first element in the file.
        unit: that has it.
        position: slot in the unit.
        begin: place of its first element, or of padding before that, in the ``owned_values`` of the unit.
        numel: elements without padding.
        whole: the elements in the file; None where they are neighbours there.
        local: the elements in the ``owned_values``, from ``begin`` on; None where there is no padding.
        counted: whether it is this rank's copy of them that is saved.
    """

    start: int
    unit: Unit
    position: int
    begin: int
    numel: int
    whole: StridedRange | None = None
    local: StridedRange | None = None
    counted: bool = True

    @property
    def in_file(self) -> StridedRange:
        """The elements in the file."""
        return self.whole or StridedRange.plain(self.start, self.start + self.numel)

    @property
    def span(self) -> int:
        """Elements with padding."""
        return self.numel if self.local is None else self.local.stop - self.local.start

    def place(self, start: int, stop: int) -> tuple[int, int]:
        """Where elements ``start`` to ``stop`` of it lie in the ``owned_values``, with the padding after each."""
        if self.local is None:
            return self.begin + start, self.begin + stop
        first = self.local.at(start) if start else self.local.start
        return first, self.local.at(stop) if stop < self.numel else self.local.stop


class Home:
    """Where one kind of elements, values or a state of the optimizer, rests; ``begin`` counts in the unit."""

    def __init__(self, part: str) -> None:
        """``part``: of the records of the tier."""
        self._windows = OpenWindows(part)

    def expect(self, pieces: Iterable[ParameterPiece]) -> None:
        """Each element of ``pieces`` will pass once, padding too."""
        self._windows.expect(pieces)

    def read(self, piece: ParameterPiece, begin: int, into: Tensor) -> None:
        """Copy elements of ``piece`` from ``begin`` on to ``into``."""
        raise NotImplementedError

    def write(self, piece: ParameterPiece, begin: int, values: Tensor) -> None:
        """Replace elements of ``piece`` from ``begin`` on by ``values``."""
        raise NotImplementedError


class HeldPieces:
    """Elements of pieces, one piece after the other. Each element is read once, or written once."""

    def __init__(self, pieces: Sequence[ParameterPiece], home: Home) -> None:
        self._pieces, self._home = pieces, home
        self._ends = list(accumulate(piece.numel for piece in pieces))
        home.expect(pieces)

    def __getitem__(self, part: slice, /) -> Tensor:
        """(elements of ``part``,) fp32 copy on the host. Raises TierError: a tier cannot read them."""
        found = torch.empty(part.stop - part.start, dtype=torch.float32, device="cpu")
        for piece, elements, inside in self._touched(part):
            begin, end = piece.place(elements.start, elements.stop)
            if piece.local is None:
                self._home.read(piece, begin, found[inside])
            else:
                padded = torch.empty(end - begin, dtype=torch.float32, device="cpu")
                self._home.read(piece, begin, padded)
                kept = EvenRuns.of([piece.local.clipped(range(begin, end))])
                kept.gather(padded.numpy(), begin, found[inside].numpy())
        return found

    def __setitem__(self, part: slice, values: Tensor, /) -> None:
        """Put ``values``, (elements of ``part``,), where they rest; a tier may have them only after the last part.

        Raises:
            TierError: a tier cannot take them.
        """
        for piece, elements, inside in self._touched(part):
            begin, end = piece.place(elements.start, elements.stop)
            self._home.write(piece, begin, with_padding(piece, begin, end, values[inside]))

    def clear_empty(self, pieces: Iterable[ParameterPiece]) -> None:
        """Make zero what has no elements but padding; instead of ``values``, which do not pass. Not collective."""
        empty = list(pieces)
        self._home.expect(empty)
        for piece in empty:
            self._home.write(
                piece, piece.begin, torch.zeros(piece.span, dtype=torch.float32, device="cpu")
            )

    def _touched(self, part: slice) -> Iterator[tuple[ParameterPiece, slice, slice]]:
        """Each piece with elements in ``part``: which of them, counted in the piece, and their place in ``part``."""
        index, at = bisect_right(self._ends, part.start), part.start
        while at < part.stop:
            piece, end = self._pieces[index], self._ends[index]
            stop, first = min(end, part.stop), end - piece.numel
            yield piece, slice(at - first, stop - first), slice(at - part.start, stop - part.start)
            index, at = index + 1, stop


HeldElements: TypeAlias = HeldPieces | Tensor  # of one dataset


def with_padding(piece: ParameterPiece, begin: int, end: int, values: Tensor) -> Tensor:
    """``values`` of a piece as they lie in the ``owned_values`` from ``begin`` to ``end``; padding is zero."""
    if piece.local is None:
        return values
    found = torch.zeros(end - begin, dtype=torch.float32, device="cpu")
    held = EvenRuns.of([piece.local.clipped(range(begin, end))])
    held.scatter(values.numpy(), found.numpy(), begin)
    return found


class ValuesHome(Home):
    """Values of parameters; ``unit.publish`` follows once all are written."""

    def __init__(self) -> None:
        super().__init__(VALUES)

    @override
    def read(self, piece: ParameterPiece, begin: int, into: Tensor) -> None:
        rest = piece.unit.rest
        if isinstance(rest, AwayRest):
            self._windows.read(rest.shard, begin, into)
            return
        if isinstance(rest, EncodedRest):
            rest.read_some(begin, into)
            return
        with piece.unit.owned_values() as values, torch.no_grad():
            into.copy_(values[begin : begin + len(into)])

    @override
    def write(self, piece: ParameterPiece, begin: int, values: Tensor) -> None:
        rest = piece.unit.rest
        if isinstance(rest, AwayRest):
            rest.updated(range(begin, begin + len(values)), values)
            self._windows.write(rest.shard, begin, values)
            return
        with piece.unit.owned_values(changes=True) as here, torch.no_grad():
            here[begin : begin + len(values)].copy_(values)


class StateHome(Home):
    """One state of the optimizer that is there for every element; zero where there is none yet."""

    def __init__(
        self, key: str, state_of: Callable[[ParameterPiece], MutableMapping[Any, Any]]
    ) -> None:
        """``state_of``: what of the state of a piece is in memory."""
        super().__init__(key)
        self._key, self._state_of = key, state_of

    @override
    def read(self, piece: ParameterPiece, begin: int, into: Tensor) -> None:
        if piece.unit.away is not None:
            self._windows.read(piece.unit.away, begin, into)
            if self._key not in self._state_of(piece):
                into.zero_()  # left on the tier by a state that was cleared since
            return
        value = self._state_of(piece).get(self._key)
        if value is None:
            into.zero_()
            return
        first = begin - piece.begin
        if isinstance(value, CodedState):
            into.copy_(value.read(first, len(into)))
            return
        # What a program has made of a piece is a piece
        with torch._C.DisableTorchFunctionSubclass():
            found = value.detach().reshape(-1)[first : first + len(into)]
            into[: len(found)].copy_(found)
        into[len(found) :].zero_()  # of a state with fewer elements than its parameter

    @override
    def write(self, piece: ParameterPiece, begin: int, values: Tensor) -> None:
        # In memory the state is made, zero at first.
        if piece.unit.away is not None:
            self._windows.write(piece.unit.away, begin, values)
            return
        state = self._state_of(piece)
        if self._key not in state:
            device = piece.unit.optimized.master.device
            state[self._key] = torch.zeros(piece.span, device=device, dtype=torch.float32)
        first = begin - piece.begin
        state[self._key][first : first + len(values)].copy_(values)


class OpenWindows:
    """Windows of one part on the tier of which some elements have passed. See [Note: Open windows]."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._open: dict[tuple[AwayShard, int], _HeldWindow] = {}
        self._left: dict[tuple[AwayShard, int], int] = {}  # elements that have not passed
        self._begun: set[tuple[AwayShard, int]] = set()

    def expect(self, pieces: Iterable[ParameterPiece]) -> None:
        """The elements of ``pieces`` will pass. A window closes once all that are expected there have passed."""
        for piece in pieces:
            if piece.unit.away is not None:
                shard = piece.unit.away
                for index, inside, _ in _spans(shard, piece.begin, piece.span):
                    count = inside.stop - inside.start
                    self._left[shard, index] = self._left.get((shard, index), 0) + count

    def read(self, shard: AwayShard, begin: int, into: Tensor) -> None:
        """Copy elements of ``shard`` from ``begin`` on to ``into``. Raises TierError: they cannot be read."""
        for index, inside, at in _spans(shard, begin, len(into)):
            if at.stop < len(into) and (shard, index + 1) not in self._open:
                shard.start_window(index + 1, self._part)
            window = self._open.get((shard, index))
            if window is None:
                self._make_room(shard, index)
                window = _HeldWindow(shard.read_window(index, self._part), changed=False)
            into[at] = window.values[inside]
            self._passed(shard, index, window, len(into[at]))

    def write(self, shard: AwayShard, begin: int, values: Tensor) -> None:
        """As ``read``, the other way; what a window held before is not looked at."""
        for index, inside, at in _spans(shard, begin, len(values)):
            key = shard, index
            window = self._open.get(key)
            if window is None:
                self._make_room(shard, index)
                new = shard.read_window(index, self._part) if key in self._begun else None
                window = _HeldWindow(
                    torch.zeros(len(shard.windows[index]), dtype=torch.float32, device="cpu")
                    if new is None
                    else new
                )
            window.values[inside] = values[at]
            self._passed(shard, index, window, len(values[at]))

    def _passed(self, shard: AwayShard, index: int, window: _HeldWindow, count: int) -> None:
        key = shard, index
        self._left[key] -= count
        self._begun.add(key)
        if self._left[key]:
            self._open[key] = window
            return
        self._left.pop(key)
        self._open.pop(key, None)
        self._close(shard, index, window)

    def _make_room(self, shard: AwayShard, index: int) -> None:
        new = len(shard.windows[index]) * torch.float32.itemsize
        while self._open and new + sum(w.values.nbytes for w in self._open.values()) > OPEN_NBYTES:
            (other, place), window = self._open.popitem()
            self._close(other, place, window)

    def _close(self, shard: AwayShard, index: int, window: _HeldWindow) -> None:
        if window.changed:
            shard.write_window(index, self._part, window.values)


@dataclass(frozen=True)
class _HeldWindow:
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


# From a rank's shard of a parameter's part to its place in the file.
#
#     whole parameter       | . a a a . . . . | . b b b . . . . |      a cut along an inner dimension: one run a row
#     this rank's part      | a a a x | b b b x |                      x: padding
#     its shard of it           [ a a x | b ]                          a piece


def piece_of(
    unit: Unit,
    position: int,
    part: range,
    shift: int,
    placement: Placement,
    place: int,
    counted: bool,
) -> ParameterPiece:
    """The piece of one slot.

    Args:
        unit: that has it.
        position: of the slot in the unit.
        part: elements of the slot that this rank's shard has, counted in the slot; not empty.
        shift: from places in the slot to those in the ``owned_values`` of the unit.
        placement: of the slot in the whole parameter.
        place: of the whole parameter in the file.
        counted: whether this rank saves it.
    """
    if placement.dim is None:
        begin = part.start + shift
        return ParameterPiece(place + part.start, unit, position, begin, len(part), counted=counted)
    after = prod(placement.shape[placement.dim + 1 :])
    # As Placement.runs: run after run, at one distance in the part and at another one in the whole.
    length = len(placement.owned) * after
    local = StridedRange(0, part.stop, 0, placement.room * after, length)
    first, last = local.before(part.start), local.before(part.stop)
    base = place + placement.owned.start * after
    whole = StridedRange(base, base, base, placement.strip * after, length)
    start, stop = (whole.at(first), whole.at(last - 1) + 1) if last > first else (base, base)
    return ParameterPiece(
        start,
        unit,
        position,
        part.start + shift,
        last - first,
        whole=whole._replace(start=start, stop=stop) if stop - start > last - first else None,
        local=StridedRange(part.start + shift, part.stop + shift, shift, local.stride, length)
        if placement.is_padded
        else None,
        counted=counted,
    )
