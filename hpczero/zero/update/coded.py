"""CodedUpdate: torch's own step of an elementwise optimizer whose state is kept in codes between steps.

    codes     (elements of the unit's masters,)    blocks count from the start of the unit; a shard is whole blocks
    update    [ decoded ] -> torch's step over pieces of the unit -> [ encoded ]       unit by unit

Between steps ``optimizer.state`` holds a ``CodedState`` in place of each tensor. Parameters of a unit that are not
stepped on keep their codes, unless a neighbour in their block changes its scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.plan.layout import DEFAULT_ALIGN
from hpczero.zero.units.guard import own_gradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import Update, piece_state

ATTRIBUTE = "hpczero_coded_states"


class StateCodec(Protocol):
    """Numbers as codes of one byte, with an fp32 scale for each block of ``DEFAULT_ALIGN``.

    What is decoded must be encoded as what it was.
    """

    dtype: torch.dtype

    def encode(self, values: Tensor, /) -> tuple[Tensor, Tensor]:
        """(numel,) fp32 in; (numel,) codes and (numel / block,) scales."""

    def decode(self, codes: Tensor, scales: Tensor, /) -> Tensor:
        """The other way."""


class Coded:
    """One state of all elements of a unit that this rank steps on; zero at first."""

    def __init__(self, codec: StateCodec, numel: int, device: torch.device) -> None:
        self._codec = codec
        self.codes = torch.zeros(numel, dtype=codec.dtype, device=device)
        self.scales = torch.zeros(numel // DEFAULT_ALIGN, device=device, dtype=torch.float32)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def read(self, start: int, stop: int) -> Tensor:
        """(stop - start,) fp32."""
        first = start // DEFAULT_ALIGN
        last = -(-stop // DEFAULT_ALIGN)
        codes = self.codes[first * DEFAULT_ALIGN : last * DEFAULT_ALIGN]
        begin = start - first * DEFAULT_ALIGN
        return self._codec.decode(codes, self.scales[first:last])[begin : begin + stop - start]

    def read_all(self) -> Tensor:
        """(numel,) fp32."""
        return self._codec.decode(self.codes, self.scales)

    def write_all(self, values: Tensor) -> None:
        """Replace all by ``values``, (numel,) fp32."""
        codes, scales = self._codec.encode(values)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


@dataclass(frozen=True)
class CodedState:
    """The state of one piece, in place of a tensor.

    Attributes:
        of: the unit's.
        start, stop: of its elements there.
    """

    of: Coded
    start: int
    stop: int

    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """(count,) fp32, from element ``first`` on; None: to the last."""
        start = self.start + first
        return self.of.read(start, self.stop if count is None else start + count)


class CodedUpdate(Update):
    """Of an optimizer whose class names codecs for its states."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._codecs: dict[str, StateCodec] = getattr(type(optimizer), ATTRIBUTE)
        step: Any = type(optimizer).step
        self._method: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
        self._coded: dict[tuple[Unit, str], Coded] = {}

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> None:
        self._slots = {unit: set(own) for unit, own in slots.items()}

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of all codes."""
        return sum(coded.nbytes for coded in self._coded.values())

    @override
    def take(self, *, last: bool) -> None:
        """Take the step over all units that have gradients."""
        group_of = self._group_of()
        with self._taking():
            for unit in self._slots:
                if unit.gradients.present:
                    self._take(unit, group_of)

    @override
    def adopt(self) -> None:
        """Encode what is not."""
        for unit in self._slots:
            for name in self._codecs:
                found = [
                    (piece, place, self._state(piece).get(name))
                    for piece, place in self._pieces(unit)
                ]
                mine = self._coded.get((unit, name))
                if all(
                    value is None or (isinstance(value, CodedState) and value.of is mine)
                    for _, _, value in found
                ):
                    continue
                flat = self._read(unit, name, anew=True)
                for _, place, value in found:
                    if value is not None:
                        read = value.read() if isinstance(value, CodedState) else value.reshape(-1)
                        flat[place].copy_(read)
                self._write(unit, name, flat)
                for piece, place, value in found:
                    if value is not None:
                        self._note(piece, place, unit, name)

    @override
    def forget(self) -> None:
        self._coded.clear()

    def _pieces(self, unit: Unit) -> list[tuple[nn.Parameter, slice]]:
        """What the optimizer has of a unit, and where each lies in the masters."""
        optimized = unit.optimized
        places = zip(optimized.parameters, optimized.slots, optimized.places, strict=True)
        return [(piece, place) for piece, slot, place in places if slot in self._slots[unit]]

    def _state(self, piece: nn.Parameter) -> MutableMapping[str, Any]:
        return piece_state(self._optimizer.state, piece)

    def _read(self, unit: Unit, name: str, *, anew: bool = False) -> Tensor:
        """(elements of the masters,) fp32 of one state; zeros where there is none, or ``anew``."""
        if (unit, name) in self._coded and not anew:
            return self._coded[unit, name].read_all()
        master = unit.optimized.master
        return torch.zeros(len(master), device=master.device, dtype=torch.float32)

    def _write(self, unit: Unit, name: str, flat: Tensor) -> None:
        if (unit, name) not in self._coded:
            self._coded[unit, name] = Coded(self._codecs[name], len(flat), flat.device)
        self._coded[unit, name].write_all(flat)

    def _note(self, piece: nn.Parameter, place: slice, unit: Unit, name: str) -> None:
        coded = CodedState(self._coded[unit, name], place.start, place.stop)
        self._optimizer.state[piece][name] = coded

    def _take(self, unit: Unit, group_of: Mapping[int, int]) -> None:
        """Step on a unit: its states are fp32 for that time."""
        optimizer, pieces = self._optimizer, self._pieces(unit)
        here = [(p, at) for p, at in pieces if own_gradient(p) is not None and id(p) in group_of]
        if not here:
            return
        flat = {name: self._read(unit, name) for name in self._codecs}
        for piece, place in here:
            state = self._state(piece)
            for name in self._codecs:
                if name in state:
                    state[name] = flat[name][place]
        for group in optimizer.param_groups:
            group["params"] = []
        for piece, _ in here:
            optimizer.param_groups[group_of[id(piece)]]["params"].append(piece)
        self._method(optimizer)
        for name, (piece, place) in itertools.product(self._codecs, here):
            value = self._state(piece).get(name)
            if value is not None and value.data_ptr() != flat[name][place].data_ptr():
                flat[name][place].copy_(value)  # made in this step
        for name, values in flat.items():
            self._write(unit, name, values)
            for piece, place in here:
                if name in self._state(piece):
                    self._note(piece, place, unit, name)
