"""Whole states: what an optimizer keeps of a whole parameter, between steps in parts on the ranks that hold its shards.

Owns: which element of a state is kept with which part, and the names under which. Must not know: ranks, messages,
optimizers.

    as large as the parameter   (n,)          cut as the parameter is, under its own name
    any other shape             (k,) of n     element i with element i of the parameter; ``name.1`` has those from n
                                              on, ``name.2`` from 2n on; ``name.shape.0`` ... are its dimensions
    one number                                with every part

So each is cut evenly enough, and is to a checkpoint what any optimizer's state is: fp32 by elements, and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpczero.errors import StepError

SHAPE = ".shape."
Number = int | float | bool | None


@dataclass(frozen=True)
class Entry:
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


def entries_of(state: Mapping[str, Any], shape: Sequence[int], name: str) -> list[Entry]:
    """The states that an optimizer has made of a whole parameter.

    Args:
        state: ``optimizer.state[parameter]``.
        shape: of the parameter.
        name: of the parameter, for messages.

    Raises:
        StepError: one is neither an fp32 tensor nor a number.
    """
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.dtype == torch.float32:
            found.append(Entry(key, tuple(value.shape)))
        elif isinstance(value, Tensor) and not value.dim():
            kind = f"tensor:{str(value.dtype).removeprefix('torch.')}"
            found.append(Entry(key, kind=kind, number=value.item()))
        elif value is None:
            found.append(Entry(key, kind="none"))
        elif type(value) in (bool, int, float):
            found.append(Entry(key, kind=type(value).__name__, number=value))
        else:
            got = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise StepError(
                f"state {key!r} that the optimizer has made of {name!r}, of shape {tuple(shape)}, is {got}, expected "
                "fp32 tensors and numbers: it is kept in parts over the ranks"
            )
    return found


def kept_entries(state: Mapping[str, Any], shape: Sequence[int]) -> list[Entry]:
    """As ``entries_of``, of the states that are kept with a part of the parameter."""
    sizes: dict[str, list[int]] = {}
    for key, value in state.items():
        name, found, place = key.rpartition(SHAPE)
        if found and place.isdecimal():
            sizes.setdefault(name, []).append(int(value))
    numel = prod(shape)
    further = {n for name, size in sizes.items() for n in Entry(name, tuple(size)).names(numel)[1:]}
    found_entries = []
    for key, value in state.items():
        if key in further or (SHAPE in key and key.rpartition(SHAPE)[0] in sizes):
            continue
        if isinstance(value, Tensor) and value.dim():
            found_entries.append(Entry(key, tuple(sizes.get(key, shape))))
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
    entries: Sequence[Entry],
    values: Tensor,
    part: range,
    shape: Sequence[int],
) -> None:
    """Keep with ``part`` of a parameter what ``taken`` gives; other states that are there go.

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


def held(
    state: Mapping[str, Any], entries: Sequence[Entry], part: range, numel: int
) -> list[Tensor]:
    """The elements that are kept with ``part``, as ``put`` takes them; flat tensors.

    Raises:
        KeyError: a state is not there.
    """
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


def to_text(entries: Sequence[Entry]) -> str:
    """Entries as JSON; numbers come back bit for bit."""
    return json.dumps([[e.name, e.shape, e.kind, e.number] for e in entries])


def from_text(text: str) -> list[Entry]:
    """What ``to_text`` was given."""
    return [
        Entry(name, None if shape is None else tuple(shape), kind, number)
        for name, shape, kind, number in json.loads(text)
    ]
