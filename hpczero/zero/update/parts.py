"""PartedUpdate: torch's own step of an elementwise optimizer, taken over few long tensors instead of many short ones.

Owns: what stands in ``param_groups`` while torch's step runs, and which units are stepped on together. Must not know:
the agreement of ranks, clipping, what follows an update.

torch's ``step`` is a method wrapped in hooks. In the last hook before it the method itself is called, on the spans of
the units; around that the groups are put back, whatever happens. What torch calls after the hook finds groups without
parameters. A class that is not torch's own may look at anything in its groups, so it steps on the pieces themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpczero.zero.units.guard import have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizers import ELEMENTWISE
from hpczero.zero.update.spans import Span


def method_behind(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step of ``optimizer`` without hooks; None where pieces cannot be put together for it."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE or not kind.step.__module__.startswith("torch.optim."):
        return None
    return getattr(kind.step, "__wrapped__", None)


class PartedUpdate:
    """Of one optimizer; nothing here is collective."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer) -> None:
        """``optimizer`` has been pointed at the shards of ``units``, the trainable ones."""
        self._units = list(units)
        self._optimizer = optimizer
        self._method = method_behind(optimizer)
        self._capturable = [group.get("capturable") for group in optimizer.param_groups]
        self._members: list[
            list[int]
        ] = []  # ids of the pieces in each group, for which the spans were made
        self._spans: dict[Unit, list[Span]] = {}
        self._put_away: list[list[nn.Parameter]] | None = None

    @property
    def taken(self) -> bool:
        """Whether torch's own call has nothing left to do; until ``restore``."""
        return self._put_away is not None

    def take(self) -> None:
        """Take the step of the optimizer over all units that have gradients, where it need not be torch's own call.

        It is ``taken`` then: the groups are empty until ``restore``.
        """
        groups = self._optimizer.param_groups
        method = self._method
        if method is None or any(group.get("differentiable") for group in groups):
            return
        # torch.compile sets this in every group that it steps on by itself.
        if [group.get("capturable") for group in groups] != self._capturable:
            return
        if not self._make_spans():
            return
        self._put_away = [group["params"] for group in groups]
        try:
            for units in self._parts():
                self._take(method, units)
        except BaseException:
            self.restore()
            raise
        for group in groups:
            group["params"] = []

    def restore(self) -> None:
        """Put the pieces back into their groups; nothing if they are there."""
        if self._put_away is not None:
            for group, pieces in zip(self._optimizer.param_groups, self._put_away, strict=True):
                group["params"] = pieces
            self._put_away = None

    def _parts(self) -> list[list[Unit]]:
        """Units that are stepped on in one call of torch's method."""
        return [[unit for unit in self._units if unit.gradients.present]]

    def _make_spans(self) -> bool:
        """Spans of the pieces as the groups hold them now; whether there can be any."""
        members = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
        if members == self._members:
            return True
        group_of = {piece: index for index, ids in enumerate(members) for piece in ids}
        if len(group_of) < sum(map(len, members)):
            return False  # torch steps twice on what is there twice
        self._members = members
        self._spans = {unit: _spans_of(unit, group_of) for unit in self._units}
        return True

    def _take(self, method: Callable[[Optimizer], Any], units: Sequence[Unit]) -> None:
        """One call of torch's method."""
        states: dict[Any, Any] = self._optimizer.state
        groups = self._optimizer.param_groups
        for group in groups:
            group["params"] = []
        taken: list[tuple[Span, int, int, nn.Parameter]] = []
        spans: list[tuple[Span, list[bool]]] = []
        for unit in units:
            master, gradient = unit.optimized.master, unit.gradients.reduced
            for span in self._spans[unit]:
                # Past what ShardStates asks of each key: these are known.
                span.take_up([dict.get(states, piece) for piece in span.pieces])
                present = have_gradients(span.pieces)
                spans.append((span, present))
                for first, last in span.runs(present):
                    long = span.tensor(first, last, master, gradient)
                    state = span.state(first, last)
                    if state:
                        dict.__setitem__(states, long, state)
                    groups[span.group]["params"].append(long)
                    taken.append((span, first, last, long))
        try:
            method(self._optimizer)
        finally:
            for span, first, last, long in taken:
                span.keep(first, last, dict.pop(states, long, {}))
            for span, stepped in spans:
                for piece, state in span.changed():
                    held = states[piece] if dict.__contains__(states, piece) else None
                    if held is None:
                        dict.__setitem__(states, piece, state)
                    else:  # the same dictionary, which a loop may have in hand
                        held.clear()
                        held.update(state)
                span.end(stepped)


def _spans_of(unit: Unit, group_of: dict[int, int]) -> list[Span]:
    """Neighbours in one group and one rank's piece.

    Kernels round the tail of a tensor differently, and a replicated optimizer must give the bits of a sharded one.
    """
    shards = unit.optimized
    found = []
    at: list[tuple[int | None, int, int]] = []  # group, rank's piece, index
    for index, (shard, piece) in enumerate(zip(shards.parameters, shards.pieces, strict=True)):
        at.append((group_of.get(id(shard)), piece, index))
    for (group, _), neighbours in itertools.groupby(at, key=lambda entry: entry[:2]):
        if group is None:
            continue
        indices = [index for _, _, index in neighbours]
        places = [shards.places[index] for index in indices]
        ends = [places[0].start, *(place.stop for place in places)]
        pieces = [shards.parameters[index] for index in indices]
        found.append(Span(pieces, ends, group=group))
    return found
