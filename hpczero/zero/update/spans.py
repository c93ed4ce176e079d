"""Spans: neighbouring pieces of one optimizer group, whose state lies end to end, so that they are stepped on as one.

Owns: the state of an elementwise optimizer over such neighbours, and which of them may be one tensor now. Must not
know: units, ranks, what a step computes.

An optimizer works through hundreds of small tensors, one call or launch each; the elements do not care (issue 17, S3).
Between steps every piece has state of its own in ``optimizer.state``, as torch would have made it: views of the span's.
Whatever a loop, a checkpoint or ``load_state_dict`` put there instead is taken up at the next step.

[Note: Counters]
State without a dimension, ``step`` say, belongs to one piece. Pieces that were always stepped on together have equal
counters, and are one tensor with one counter during a step. A piece that had no gradient at some step has another
counter from then on, and is stepped on apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

State = dict[str, Any]


class Span:
    """Some neighbours: at least one piece.

    Attributes:
        pieces: what the optimizer's group holds.
        group: index of it.
        start: element of the master at which the first begins.
    """

    def __init__(self, pieces: Sequence[nn.Parameter], ends: Sequence[int], *, group: int) -> None:
        """Not collective.

        Args:
            pieces: in the order of the master, without gaps.
            ends: (pieces + 1,) elements of the master: where the first begins, and where each ends.
            group: of the optimizer.
        """
        self.pieces = list(pieces)
        self.group = group
        self.start = ends[0]
        self._ends = [end - ends[0] for end in ends]
        self._wholes: State = {}  # by name: (elements,), of which pieces have views
        self._counters: dict[str, Tensor] = {}  # by name: (pieces,)
        self._given: list[State] = [{} for _ in pieces]  # what each had after the last step
        self._likes = [0] * len(pieces)  # equal where the counters are; -1: stepped on by itself
        self._objects: list[Any] = []  # of ``_given``, which keeps them alive
        self._laid: set[tuple[str, int, int]] = set()  # state that is known to lie as it should
        self._versions: dict[str, int] = {}
        self._changed: set[int] = (
            set()
        )  # pieces whose state is made of other objects than before the step

    def take_up(self, states: Sequence[State | None]) -> None:
        """Look at what the pieces have in ``optimizer.state`` now, (pieces,); None: nothing."""
        held = [state or {} for state in states]
        if _objects(held) == self._objects and self._versions == self._versions_now():
            return
        self._laid.clear()
        self._wholes.clear()
        self._counters.clear()
        self._versions.clear()
        self._given = [dict(state) for state in held]
        self._objects = _objects(held)
        kinds: dict[Any, int] = {}
        self._likes = [
            kinds.setdefault(kind, len(kinds)) if kind is not None else -1
            for kind in (_kind(state, p) for state, p in zip(held, self.pieces, strict=True))
        ]

    def _versions_now(self) -> dict[str, int]:
        return {name: counter._version for name, counter in self._counters.items()}

    def runs(self, present: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Longest runs of pieces that may be one tensor, as (first, behind the last).

        Args:
            present: (pieces,) whether each has a gradient.
        """
        place = 0
        pairs = zip(present, self._likes, strict=True)
        for (there, like), members in itertools.groupby(pairs):
            count = len(list(members))
            if there and like < 0:
                yield from ((place + i, place + i + 1) for i in range(count))
            elif there:
                yield place, place + count
            place += count

    def tensor(self, first: int, last: int, master: Tensor, gradient: Tensor) -> nn.Parameter:
        """The pieces ``first`` to ``last`` as one parameter; they are views of ``master``, with this ``gradient``."""
        begin, end = self._ends[first], self._ends[last]
        begin, end = self.start + begin, self.start + end
        parameter = nn.Parameter(master[begin:end])
        parameter.grad = gradient[begin:end]
        return parameter

    def state(self, first: int, last: int) -> State:
        """Their state as one, to be given to the optimizer; empty where they have none."""
        found: State = {}
        begin, end = self._ends[first], self._ends[last]
        for name, value in self._given[first].items():
            if not _is_tensor(value):
                found[name] = value
            elif value.dim():
                found[name] = self._whole(name, first, last)[begin:end]
            else:
                found[name] = value.clone()
        return found

    def _whole(self, name: str, first: int, last: int) -> Tensor:
        """The state ``name`` of the whole span, in which that of ``first`` to ``last`` lies."""
        whole: Tensor | None = self._wholes.get(name)
        if whole is not None and (name, first, last) in self._laid:
            return whole
        self._laid.add((name, first, last))
        if whole is None:
            model: Tensor = self._given[first][name]
            self._wholes[name] = whole = model.new_zeros(self._ends[-1])
        for i in range(first, last):
            part = whole[self._ends[i] : self._ends[i + 1]]
            mine = self._given[i][name]
            if mine.data_ptr() != part.data_ptr():
                part.copy_(mine)
                self._set(i, name, part)
        return whole

    def keep(self, first: int, last: int, state: State) -> None:
        """What the optimizer has made of ``state``, which every piece gets its part of."""
        begin, end = self._ends[first], self._ends[last]
        for name, value in state.items():
            if not _is_tensor(value):
                for i in range(first, last):
                    if self._given[i].get(name, self) is not value:
                        self._set(i, name, value)
            elif value.dim():
                self._keep_whole(
                    name, first, last, value, whole=(begin, end) == (0, self._ends[-1])
                )
            else:
                self._keep_counter(name, first, last, value)
        if self._given[first].keys() != state.keys():
            self._laid.clear()
            for i in range(first, last):
                for name in self._given[i].keys() - state.keys():
                    del self._given[i][name]
                    self._changed.add(i)

    def _set(self, i: int, name: str, value: Any) -> None:
        self._given[i][name] = value
        self._changed.add(i)

    def _keep_whole(self, name: str, first: int, last: int, value: Tensor, *, whole: bool) -> None:
        held = self._wholes.get(name)
        if held is not None and value.data_ptr() == held.data_ptr() + (
            self._ends[first] * held.element_size()
        ):
            return  # changed in place, as torch's optimizers do
        if whole:
            self._wholes[name] = held = value
        else:
            if held is None:
                held = self._wholes[name] = value.new_zeros(self._ends[-1])
            held[self._ends[first] : self._ends[last]].copy_(value)
        for i in range(first, last):
            self._set(i, name, held[self._ends[i] : self._ends[i + 1]])

    def _keep_counter(self, name: str, first: int, last: int, value: Tensor) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = value.new_zeros(len(self.pieces))
        (counter if last - first == len(self.pieces) else counter[first:last]).copy_(value)
        if (name, first, last) in self._laid:
            return
        self._laid.add((name, first, last))
        for i in range(first, last):
            held = self._given[i].get(name)
            if held is None or held._base is not counter:
                self._set(i, name, counter[i])

    def changed(self) -> Iterator[tuple[nn.Parameter, State]]:
        """Pieces whose state is made of other objects now, each with what is to stand in ``optimizer.state``."""
        yield from ((self.pieces[i], dict(self._given[i])) for i in sorted(self._changed))

    def end(self, stepped: Sequence[bool]) -> None:
        """The step is over. Those ``stepped`` on have other counters now than the others."""
        if self._changed:
            self._objects = _objects(self._given)
            self._changed.clear()
        self._versions = self._versions_now()
        if all(stepped):
            return  # all counters have gone on
        kinds: dict[tuple[int, bool], int] = {}
        self._likes = [
            like if like < 0 else kinds.setdefault((like, done), len(kinds))
            for like, done in zip(self._likes, stepped, strict=True)
        ]


def _objects(states: Sequence[State]) -> list[Any]:
    """What ``states`` are made of, to be compared with what they are made of later."""
    return [[(name, id(value)) for name, value in state.items()] for state in states]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _kind(state: State, piece: nn.Parameter) -> Any:
    """Equal for pieces that may be one tensor; None for one that may not: its state is not known to be elementwise."""
    kind: list[Any] = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, (bool, int, float, str, type(None))):
                return None
            kind.append((name, value))
        elif value.dim() == 0:
            kind.append((name, value.dtype, value.device, value.item()))
        elif value.shape == piece.shape and value.is_contiguous():
            kind.append((name, value.dtype, value.device))
        else:
            return None
    return tuple(sorted(kind, key=str))
