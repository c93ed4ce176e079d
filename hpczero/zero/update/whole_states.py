"""Whole states: what an optimizer keeps of a whole parameter, between steps in parts on the ranks that hold its shards.

    as large as the parameter   (n,)          cut as the parameter is, under its own name
    any other shape             (k,) of n     element i with element i of the parameter; ``name.1`` has those from n
                                              on, ``name.2`` from 2n on; ``name.shape.0`` ... are its dimensions
    one number                                with every part

So each is cut evenly enough, and is to a checkpoint what any optimizer's state is: fp32 by elements, and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import StepError
from hpczero.zero.units.guard import own_gradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import piece_state

SHAPE = ".shape."
Number = int | float | bool | None


@dataclass(frozen=True)
class StateEntry:
    """One state of one parameter.

    Attributes:
        name: under which the optimizer has it.
        shape: of a tensor; None for a number.
        kind: of a number: ``int``, ``float``, ``bool``, ``none``, or ``tensor:float32`` and the like.
        number: the number.
    """

    name: str
    shape: tuple[int, ...] | None = None
    kind: str = ""
    number: Number = None

    @property
    def numel(self) -> int:
        """Elements of a tensor; 0 for a number."""
        return 0 if self.shape is None else prod(self.shape)

    def ranges(self, part: range, numel: int) -> list[range]:
        """Elements of the state, counted in it, that are kept with ``part`` of a parameter of ``numel`` elements.

        One range for each name, which may be empty; none of a number.
        """
        limit = self.numel
        starts = range(0, max(limit, 1) if self.shape is not None else 0, numel)
        return [
            range(min(start + part.start, limit), min(start + part.stop, limit)) for start in starts
        ]

    def names(self, numel: int) -> list[str]:
        """The names under which it is kept with each part, in the order of ``ranges``."""
        count = len(self.ranges(range(0), numel))
        return [self.name, *(f"{self.name}.{place}" for place in range(1, count))]

    def value(self) -> Any:
        """The number as the optimizer has it."""
        if self.kind.startswith("tensor:"):
            return torch.tensor(
                self.number, dtype=getattr(torch, self.kind.partition(":")[2]), device="cpu"
            )
        return self.number


def entries_of(state: Mapping[str, Any], shape: Sequence[int], name: str) -> list[StateEntry]:
    """The states that an optimizer has made of a whole parameter of this shape and name.

    Raises:
        StepError: one is neither an fp32 tensor nor a number.
    """
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.dtype == torch.float32:
            found.append(StateEntry(key, tuple(value.shape)))
        elif isinstance(value, Tensor) and not value.dim():
            kind = f"tensor:{str(value.dtype).removeprefix('torch.')}"
            found.append(StateEntry(key, kind=kind, number=value.item()))
        elif value is None:
            found.append(StateEntry(key, kind="none"))
        elif type(value) in (bool, int, float):
            found.append(StateEntry(key, kind=type(value).__name__, number=value))
        else:
            got = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise StepError(
                f"state {key!r} that the optimizer has made of {name!r}, of shape {tuple(shape)}, is {got}, expected "
                "fp32 tensors and numbers: it is kept in parts over the ranks"
            )
    return found


def kept_entries(state: Mapping[str, Any], shape: Sequence[int]) -> list[StateEntry]:
    """As ``entries_of``, of the states that are kept with a part of the parameter."""
    sizes: dict[str, list[int]] = {}
    for key, value in state.items():
        name, found, place = key.rpartition(SHAPE)
        if found and place.isdecimal():
            sizes.setdefault(name, []).append(int(value))
    numel = prod(shape)
    further = {
        n for name, size in sizes.items() for n in StateEntry(name, tuple(size)).names(numel)[1:]
    }
    found_entries = []
    for key, value in state.items():
        if key in further or (SHAPE in key and key.rpartition(SHAPE)[0] in sizes):
            continue
        if isinstance(value, Tensor) and value.dim():
            found_entries.append(StateEntry(key, tuple(sizes.get(key, shape))))
        else:
            found_entries += entries_of({key: value}, shape, key)
    return found_entries


def is_packed(state: Mapping[str, Any], key: str) -> bool:
    """Whether the tensor ``key`` is kept with a part of a parameter that has another number of elements."""
    if f"{key}{SHAPE}0" in state:
        return True
    name, _, place = key.rpartition(".")
    return place.isdecimal() and f"{name}{SHAPE}0" in state


def put(
    state: MutableMapping[str, Any],
    entries: Sequence[StateEntry],
    values: Tensor,
    part: range,
    shape: Sequence[int],
) -> None:
    """Replace the ``state`` of ``part`` of a parameter of this ``shape``.

    Args:
        state: of this part.
        entries: of the whole parameter.
        values: the elements that are kept with the part, one entry after the other, flat.
        part: elements of the parameter.
        shape: of the parameter.
    """
    numel, at = prod(shape), 0
    new: dict[str, Any] = {}
    for entry in entries:
        if entry.shape is None:
            new[entry.name] = entry.value()
            continue
        pairs = zip(entry.names(numel), entry.ranges(part, numel), strict=True)
        for name, elements in pairs:
            found = values[at : at + len(elements)]
            there = state.get(name)
            if isinstance(there, Tensor) and there.shape == found.shape:
                new[name] = there.copy_(found)  # who holds a reference sees what is new
            else:
                new[name] = found.clone()
            at += len(elements)
        if entry.shape != tuple(shape):
            new |= {f"{entry.name}{SHAPE}{place}": size for place, size in enumerate(entry.shape)}
    state.clear()
    state.update(new)


def held(state: Mapping[str, Any], entries: Sequence[StateEntry], numel: int) -> list[Tensor]:
    """The elements in the ``state`` of a part, as ``put`` takes them; flat tensors."""
    return [
        state[name].detach().reshape(-1)
        for entry in entries
        if entry.shape is not None
        for name in entry.names(numel)
    ]


def trim(state: MutableMapping[str, Any], part: range, shape: Sequence[int]) -> None:
    """After a load, which gives every part as many elements as the parameter has there: keep those that count."""
    numel = prod(shape)
    for entry in kept_entries(state, shape):
        if entry.shape is not None and entry.shape != tuple(shape):
            pairs = zip(entry.names(numel), entry.ranges(part, numel), strict=True)
            for name, elements in pairs:
                value = state.get(name)
                if isinstance(value, Tensor) and value.numel() > len(elements):
                    state[name] = value.reshape(-1)[: len(elements)].clone()


def to_text(entries: Sequence[StateEntry]) -> str:
    """Entries as JSON, from which ``from_text`` makes them; numbers come back bit for bit."""
    return json.dumps([[e.name, e.shape, e.kind, e.number] for e in entries])


def from_text(text: str) -> list[StateEntry]:
    """See ``to_text``."""
    return [
        StateEntry(name, None if shape is None else tuple(shape), kind, number)
        for name, shape, kind, number in json.loads(text)
    ]


# Whole jobs: the update of one whole parameter, from its parts on all ranks to its owner and back.
#
#     of a part, to the owner    [ 1: has a gradient | gradient | values | states ], or [ 0 ]
#     to a rank, back            [ text of the entries ]  [ values | states | values | states ... ]  of its parts

States = MutableMapping[Any, Any]


@dataclass
class WholeParameter:
    """A whole parameter with its gradient and state, for the time of its update.

    Attributes:
        parameter: with the shape of the model's, fp32, and a gradient; a scalar has shape (1,).
        state: of the optimizer; it becomes that of ``parameter`` for the step, which changes it.
    """

    parameter: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)


class ParameterUpdate:
    """The update of one parameter.

    Attributes:
        unit: that has it.
        name, numel: of the parameter.
        shape: that the optimizer sees: the parameter's, or (1,) of a scalar.
        group: number of its group among those of its optimizer.
        parts: this rank's: the optimizer's parameter, and which elements it is. Several where ranks are replicas.
        by_optimizer: whether the optimizer's own step is called on what is assembled.
    """

    by_optimizer = True

    def __init__(self, unit: Unit, position: int, group: int, *, replicated: bool) -> None:
        """``position``: of the parameter in the unit. ``replicated``: every rank holds all parts."""
        slot = unit.spec.layout.slots[position]
        self.unit, self.group = unit, group
        self.name, self.numel = slot.name, slot.numel
        # A scalar is a row of one: what the optimizer keeps of it is then told from the numbers beside it.
        self.shape = slot.shape or (1,)
        self._replicated = replicated
        optimized = unit.optimized
        places = zip(optimized.parameters, optimized.slots, optimized.pieces, strict=True)
        self.parts = [
            (shard, unit.spec.layout.overlap(piece, slot.name))
            for shard, at, piece in places
            if at == position
        ]

    def parts_of(self, rank: int) -> list[range]:
        """Elements of each part that the rank with this shard holds; not empty."""
        layout = self.unit.spec.layout
        ranks = range(layout.num_shards) if self._replicated else (rank,)
        parts = (layout.overlap(each, self.name) for each in ranks)
        return [part for part in parts if part]

    @property
    def holders(self) -> list[int]:
        """Ranks that hold a part, by their shards."""
        layout = self.unit.spec.layout
        if self._replicated or not self.numel:
            return list(range(layout.num_shards if self.numel else 0))
        # By division: asking every rank takes long where there are many.
        slot = layout.slot(self.name)
        first, last = slot.offset // layout.shard_numel, (slot.stop - 1) // layout.shard_numel
        return list(range(first, last + 1))

    # --- to the owner --------------------------------------------------------------------------------------------

    def said(self, states: States) -> list[Tensor]:
        """Of each part of this rank what goes to the owner."""
        return [self._said(shard, part, states) for shard, part in self.parts]

    def _said(self, shard: nn.Parameter, part: range, states: States) -> Tensor:
        gradient = own_gradient(shard)
        if gradient is None:
            return torch.zeros(1, device=shard.device, dtype=torch.float32)
        state = piece_state(states, shard)
        kept = held(state, kept_entries(state, self.shape), self.numel)
        return torch.cat([gradient.new_ones(1), gradient, shard.detach(), *kept])

    def assemble(
        self, said: Sequence[tuple[range, Tensor]], states: States
    ) -> WholeParameter | None:
        """The whole parameter from what was said of all its parts; None where it has no gradient.

        Args:
            said: elements of each part, and ``said`` of it.
            states: of this rank's parts, whose numbers count for the parameter.

        Raises:
            StepError: some parts have a gradient and others have none, or other states.
        """
        if not self._present(said):
            return None
        device = self.parts[0][0].device
        state = piece_state(states, self.parts[0][0])
        entries = kept_entries(state, self.shape)
        gradient, values = (
            torch.empty(self.numel, device=device, dtype=torch.float32) for _ in range(2)
        )
        tensors = {
            e.name: torch.empty(e.numel, device=device, dtype=torch.float32)
            for e in entries
            if e.shape is not None
        }
        for part, each in said:
            places = [(gradient, part), (values, part)]
            for entry in entries:
                if entry.shape is not None:
                    places += [(tensors[entry.name], r) for r in entry.ranges(part, self.numel)]
            lengths = [len(elements) for _, elements in places]
            if 1 + sum(lengths) != len(each):
                raise StepError(
                    f"optimizer.state of the parts of {self.name!r} differs between ranks: got {len(each):,} numbers "
                    f"of elements {part.start:,} to {part.stop:,}, expected {1 + sum(lengths):,}; change it on all "
                    "ranks alike"
                )
            for (into, elements), values_of in zip(
                places, each[1:].split_with_sizes(lengths), strict=True
            ):
                into[elements.start : elements.stop].copy_(values_of)
        parameter = nn.Parameter(values.view(self.shape))
        vars(parameter).update(vars(self.parts[0][0]))  # what an optimizer looks for: p.lr_scale
        parameter.grad = gradient.view(self.shape)
        found = WholeParameter(parameter)
        for entry in entries:
            if entry.shape is None:
                found.state[entry.name] = entry.value()
            else:
                found.state[entry.name] = tensors[entry.name].view(entry.shape)
        return found

    def _present(self, said: Sequence[tuple[range, Tensor]]) -> bool:
        """Whether it has a gradient, by what was said of all its parts.

        Raises:
            StepError: some parts have one and others have none.
        """
        present = {bool(each[0]) for _, each in said}
        if present == {True, False}:
            raise StepError(
                f"the gradient of {self.name!r} in optimizer.param_groups is None on some ranks and not on others, "
                "and its optimizer steps on whole parameters; set it to None on all ranks alike "
                "(optimizer.zero_grad(), model.zero_grad())"
            )
        return present == {True}

    # --- and back ------------------------------------------------------------------------------------------------

    def answers(self, whole: WholeParameter | None) -> dict[int, list[Tensor]]:
        """What goes back to each rank that holds a part, two tensors on the host; None: nothing is changed.

        Raises:
            StepError: the optimizer keeps what cannot be kept in parts.
        """
        if whole is None:
            nothing = torch.empty(0, dtype=torch.float32, device="cpu")
            return {rank: [nothing, nothing] for rank in self.holders}
        mark, of_part = self._answer(whole)
        found: dict[int, list[Tensor]] = {}
        for rank in self.holders:
            if found and self._replicated:  # all get the same
                found[rank] = next(iter(found.values()))
            else:
                found[rank] = [mark, torch.cat([of_part(part) for part in self.parts_of(rank)])]
        return found

    def _answer(self, whole: WholeParameter) -> tuple[Tensor, Callable[[range], Tensor]]:
        """What all ranks get, not empty; and what gives the elements that go to one part; both on the host."""
        entries = entries_of(whole.state, self.shape, self.name)
        text = to_text(entries).encode()
        text = text.ljust(-(-len(text) // 4) * 4)

        def of_part(part: range) -> Tensor:
            pieces = [whole.parameter.detach().reshape(-1)[part.start : part.stop]]
            for entry in entries:
                if entry.shape is not None:
                    flat = whole.state[entry.name].detach().reshape(-1)
                    ranges = entry.ranges(part, self.numel)
                    pieces += [flat[elements.start : elements.stop] for elements in ranges]
            return torch.cat(pieces).cpu()

        return torch.from_numpy(np.frombuffer(text, dtype=np.float32).copy()), of_part

    def take(self, answer: Sequence[Tensor], states: States) -> None:
        """Put ``answers`` for this rank into its parts, values and state."""
        words, new = answer
        if not len(words):
            return
        entries = from_text(words.contiguous().numpy().tobytes().decode())
        kept = [
            sum(len(r) for entry in entries for r in entry.ranges(part, self.numel))
            for _, part in self.parts
        ]
        lengths = [len(part) + count for (_, part), count in zip(self.parts, kept, strict=True)]
        for (shard, part), each in zip(self.parts, new.split_with_sizes(lengths), strict=True):
            here = each.to(shard.device)
            with torch.no_grad():
                shard.copy_(here[: len(part)])
            put(states.setdefault(shard, {}), entries, here[len(part) :], part, self.shape)

    def adopt(self, states: States) -> None:
        """State was loaded."""
        for shard, part in self.parts:
            trim(piece_state(states, shard), part, self.shape)
