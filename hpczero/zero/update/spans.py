"""Spans: neighbouring pieces of one optimizer group, and which of them may be stepped on as one tensor.

Owns: where the state of such neighbours lies, and its parts in ``optimizer.state``. Must not know: units, ranks, what a
step computes.

An optimizer works through hundreds of small tensors, one call or launch each; the elements do not care (issue 17, S3).
Between steps every piece has state of its own in ``optimizer.state``, as torch would have made it. Where torch has made
it for a long tensor, those are parts of it, and nothing else remembers that: the tensors say themselves where they lie.

[Note: Apart]
A program may do anything to ``optimizer.state``. A piece whose state does not lie beside its neighbour's, was given
other memory, or has anything of the program's own in it, is stepped on by itself, with the very objects that are there.

[Note: Counters]
State without a dimension, ``step`` say, belongs to one piece. Those of a long tensor are elements of one vector. Pieces
may be one tensor while theirs are equal; that is looked at, since a program may set them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Where one tensor of a piece's state lies: ``base[begin:end]``; a counter is one element of a vector."""

    base: Tensor
    begin: int
    end: int
    counter: bool

    def goes_on_in(self, other: Part) -> bool:
        """Whether ``other`` begins where this one ends."""
        return self.base is other.base and self.end == other.begin and self.counter == other.counter


Parts = dict[str, Part]


def parts_of(state: State | None, piece: nn.Parameter) -> Parts | None:
    """Where the state of ``piece`` lies, by name; None where it has to be stepped on apart."""
    found: Parts = {}
    for name, value in (state or {}).items():
        base = value._base if type(value) is Tensor else None
        if base is None or base.stride() != (1,) or value.dtype is not base.dtype:
            return None
        counter = value.dim() == 0
        if not counter and (value.shape != piece.shape or value.stride() != (1,)):
            return None
        begin = value.storage_offset() - base.storage_offset()
        # A program may have given it other memory, which its base knows nothing of.
        if value.data_ptr() != base.data_ptr() + begin * base.element_size():
            return None
        found[name] = Part(base, begin, begin + value.numel(), counter)
    return found


def values_of(bases: Sequence[Tensor]) -> dict[int, list[Any]]:
    """The elements of vectors, by their ids; one transfer from a device for each kind of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for base in {id(base): base for base in bases}.values():
        kinds.setdefault((base.dtype, base.device), []).append(base)
    found: dict[int, list[Any]] = {}
    for alike in kinds.values():
        values = torch.cat(alike).tolist()
        for base in alike:
            found[id(base)], values = values[: base.numel()], values[base.numel() :]
    return found


class Span:
    """Some neighbours: at least one piece.

    Attributes:
        pieces: what the optimizer's group holds.
        group: index of it.
        ends: (pieces + 1,) elements of the master: where the first begins, and where each ends.
    """

    def __init__(self, pieces: Sequence[nn.Parameter], ends: Sequence[int], *, group: int) -> None:
        """Not collective; for the arguments see the attributes."""
        self.pieces = list(pieces)
        self.group = group
        self.ends = list(ends)
        self._seen: Any = None  # what the state was made of when ``_parts`` was found
        self._parts: list[Parts | None] = []
        self._joined: list[bool] = []  # whether each lies behind the one before
        # Vector and element of each of a piece's.
        self._counters: list[list[tuple[Tensor, int]]] = []
        self._runs: dict[tuple[int, int], Run] = {}

    def forget(self) -> None:
        """Let go of the state's memory."""
        self._seen = None
        self._parts.clear()
        self._counters.clear()
        self._runs.clear()

    def adopt(self, states: dict[Any, Any]) -> None:
        """Lay state that was loaded end to end, as it would lie had it been made here.

        What is not made of plain tensors, one for each element or one number each, stays apart.
        """
        self.forget()
        held = [dict.get(states, piece) or {} for piece in self.pieces]
        kinds = [_kinds(state, piece) for state, piece in zip(held, self.pieces, strict=True)]
        first = 0
        for kind, members in itertools.groupby(kinds):
            last = first + len(list(members))
            for name in kind or ():
                values = [state[name] for state in held[first:last]]
                if values[0].dim():
                    parts = torch.cat(values).split_with_sizes([value.numel() for value in values])
                else:
                    parts = torch.stack(values).unbind()
                for state, part in zip(held[first:last], parts, strict=True):
                    state[name] = part
            first = last

    def look(self, states: Sequence[State | None]) -> Iterable[Tensor]:
        """See where the state of the pieces lies now, (pieces,); vectors of counters."""
        made = [value for state in states if state for value in state.values()]
        # Which objects, and where memory is: no two live ones share both, and ``_parts`` keeps the memory alive.
        places = [value.data_ptr() if isinstance(value, Tensor) else 0 for value in made]
        seen = ([list(state) if state else None for state in states], list(map(id, made)), places)
        if seen != self._seen:
            self._parts = [parts_of(s, p) for s, p in zip(states, self.pieces, strict=True)]
            self._joined = [False, *(_beside(a, b) for a, b in pairwise(self._parts))]
            self._runs.clear()
            self._seen = seen
            self._counters = [
                [(part.base, part.begin) for part in (parts or {}).values() if part.counter]
                for parts in self._parts
            ]
        return self.counters

    @property
    def counters(self) -> Iterator[Tensor]:
        """Vectors of counters, as last seen."""
        return (base for counters in self._counters for base, _ in counters)

    def runs(self, present: Sequence[bool], values: dict[int, list[Any]]) -> Iterator[Run]:
        """Longest runs of pieces that may be one tensor.

        Args:
            present: (pieces,) whether each has a gradient.
            values: of all counters, by their vectors' ids.
        """
        counts = [[values[id(base)][at] for base, at in counters] for counters in self._counters]
        count = len(self.pieces)
        if all(present) and all(self._joined[1:]) and counts.count(counts[0]) == count:
            yield self._run(0, count)
            return
        starts = [
            i
            for i in range(count)
            if not (
                self._joined[i] and present[i - 1] and present[i] and counts[i - 1] == counts[i]
            )
        ]
        for first, last in pairwise([*starts, count]):
            if present[first]:
                yield self._run(first, last)

    def _run(self, first: int, last: int) -> Run:
        run = self._runs.get((first, last))
        if run is None:
            run = self._runs[first, last] = Run(self, first, last, self._parts)
        return run


def _kinds(state: State, piece: nn.Parameter) -> dict[str, Any] | None:
    """Of each tensor what neighbours must have alike to be laid end to end; None where there is something else."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
            return None
        if value.dim() and value.shape != piece.shape:
            return None
        found[name] = (value.dim(), value.dtype, value.device)
    return found


def _beside(one: Parts | None, other: Parts | None) -> bool:
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(part.goes_on_in(other[name]) for name, part in one.items())


class Run:
    """Neighbours that are one tensor during a step, or one piece apart.

    Attributes:
        group: index of the optimizer's group.
        pieces: of it.
        apart: whether the one piece has to be stepped on by itself.
    """

    def __init__(self, span: Span, first: int, last: int, parts: Sequence[Parts | None]) -> None:
        """Not collective.

        Args:
            span: whose pieces they are.
            first: of them.
            last: the one behind the last.
            parts: (pieces of the span,) of ``parts_of``.
        """
        self.group = span.group
        self.pieces = span.pieces[first:last]
        self.apart = parts[first] is None
        self._ends = [end - span.ends[first] for end in span.ends[first : last + 1]]
        self._begin, self._end = span.ends[first], span.ends[last]
        begins, ends = parts[first] or {}, parts[last - 1] or {}
        self._parts = {
            name: Part(part.base, part.begin, ends[name].end, part.counter)
            for name, part in begins.items()
        }

    def tensor(self, master: Tensor) -> nn.Parameter:
        """One parameter for all of them, a view of ``master``."""
        return nn.Parameter(self.part_of(master))

    def part_of(self, flat: Tensor) -> Tensor:
        """Theirs of ``flat``, which is cut as the master is."""
        return flat[self._begin : self._end]

    def state(self) -> State:
        """Their state as one; empty where they have none."""
        return {
            name: part.base[part.begin].clone()
            if part.counter
            else part.base[part.begin : part.end]
            for name, part in self._parts.items()
        }

    def give(self, before: State, after: State, states: dict[Any, Any]) -> bool:
        """The optimizer has made ``after`` of ``before``: every piece gets its part, in ``states``.

        Returns:
            Whether ``after`` can be the state before the next step: nothing is new, or lies elsewhere.
        """
        same = after.keys() == self._parts.keys()
        for name, value in after.items():
            part = self._parts.get(name)
            if part is None:
                self._give_new(name, value, states)
                continue
            if part.counter:
                part.base[part.begin : part.end].copy_(value)
                same = same and isinstance(value, Tensor)
            elif value is not before[name]:
                part.base[part.begin : part.end].copy_(value)
                same = False
        for name in self._parts.keys() - after.keys():
            for piece in self.pieces:
                del states[piece][name]
        return same

    def _give_new(self, name: str, value: Any, states: dict[Any, Any]) -> None:
        if isinstance(value, Tensor) and value.dim() == 0:
            values: Any = value.repeat(len(self.pieces))  # a copy that is dense for one piece too
        elif isinstance(value, Tensor):
            # A base of its own: parts_of asks for it.
            whole = value if value._base is None else value.clone()
            values = [whole[begin:end] for begin, end in pairwise(self._ends)]
        else:
            values = [value] * len(self.pieces)
        for i, piece in enumerate(self.pieces):
            held = states[piece] if dict.__contains__(states, piece) else None
            if held is None:
                held = {}
                dict.__setitem__(states, piece, held)
            held[name] = values[i]
