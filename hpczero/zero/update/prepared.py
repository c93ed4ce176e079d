"""Prepared: what a step was taken over, and whether the next one may be taken over the same.

Owns: the long tensors of a step with their state, and what has to be as it was for them to serve once more. Must not
know: how pieces are put together, what a step computes.

Training takes the same step again and again. What a program may have changed meanwhile is looked at in a few passes
over all pieces; only where something is not as it was are they put together anew (issue 20, 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.zero.units.guard import all_have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.spans import Run, State

_version = attrgetter("_version")


class Prepared:
    """One call of torch's method over all units that have gradients.

    Attributes:
        units: in unit order.
        runs: of each long tensor its unit, its pieces, itself, and its state.
        apart: pieces that are stepped on by themselves, each with the number of its group.
    """

    def __init__(self, units: Sequence[Unit], pieces: Sequence[nn.Parameter]) -> None:
        """Not collective.

        Args:
            units: see the attribute.
            pieces: of those units, in the groups of the optimizer.
        """
        self.units = list(units)
        self.runs: list[tuple[Unit, Run, nn.Parameter, State]] = []
        self.apart: list[tuple[int, nn.Parameter]] = []
        self._pieces = list(pieces)
        self._masters = [unit.optimized.master for unit in units]
        self._known = False  # whether what follows was looked at
        self._made: list[Tensor] = []
        self._names: list[str] = []
        self._places: list[int] = []
        self._counters: list[Tensor] = []  # vectors of counters, each once
        self._versions: list[int] = []
        self._counts: Tensor | None = None  # on the host: their values

    def add(self, unit: Unit, run: Run) -> None:
        """Put the pieces of ``run`` together."""
        if run.apart:
            self.apart += [(run.group, piece) for piece in run.pieces]
        else:
            self.runs.append((unit, run, run.tensor(unit.optimized.master), run.state()))

    def note(self, states: dict[Any, Any], counters: Sequence[Tensor]) -> bool:
        """The step is over: remember what there is. Returns whether it can serve again.

        Args:
            states: of the optimizer.
            counters: vectors of the pieces' counters.
        """
        if not self._known and not self._look(states, counters):
            return False
        self._known = True  # a step that can serve again changes counters and nothing else
        self._versions = [*map(_version, self._counters)]
        self._counts = self._counts_now()
        return True

    def _look(self, states: dict[Any, Any], counters: Sequence[Tensor]) -> bool:
        held = self._held(states)
        if sum(len(run.pieces) for _, run, _, _ in self.runs) != len(self._pieces):
            return False  # some had no gradient, or were apart
        if not held or any(type(state) is not dict for state in held):
            return False
        self._made = [*chain.from_iterable(map(dict.values, held))]
        if any(type(value) is not Tensor for value in self._made):
            return False
        self._names = [*chain.from_iterable(held)]
        self._places = self._places_now()
        self._counters = [*{id(vector): vector for vector in counters}.values()]
        return True

    def serves(self, units: Sequence[Unit], states: dict[Any, Any]) -> bool:
        """Whether a step over ``units`` now is the one of before, on state that nobody has touched."""
        if len(units) != len(self.units) or not all(map(is_, units, self.units)):
            return False
        masters = [unit.optimized.master for unit in units]
        if not (all(map(is_, masters, self._masters)) and all_have_gradients(self._pieces)):
            return False
        held = self._held(states)
        try:
            made = [*chain.from_iterable(map(dict.values, held))]
        except TypeError:  # no state, or a program's own kind of it
            return False
        if len(made) != len(self._made) or not all(map(is_, made, self._made)):
            return False
        if [*chain.from_iterable(held)] != self._names or self._places_now() != self._places:
            return False
        if [*map(_version, self._counters)] != self._versions:
            return False
        return self._counts is None or torch.equal(self._counts_now(), self._counts)  # type: ignore[arg-type]

    def _held(self, states: dict[Any, Any]) -> list[Any]:
        return [dict.get(states, piece) for piece in self._pieces]

    def _places_now(self) -> list[int]:
        """A program may give any of it other memory."""
        return [*map(Tensor.data_ptr, self._made), *map(Tensor.data_ptr, self._masters)]

    def _counts_now(self) -> Tensor | None:
        """Versions do not tell of what is written past them, NumPy's or ``.data``; a device's are not waited for."""
        here = [vector for vector in self._counters if vector.device.type == "cpu"]
        kinds = {vector.dtype for vector in here}
        return torch.cat(here) if len(kinds) == 1 else None
