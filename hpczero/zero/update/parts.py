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

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpczero.zero.units.guard import have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizers import ELEMENTWISE
from hpczero.zero.update.prepared import Prepared
from hpczero.zero.update.spans import Span, State, values_of
from hpczero.zero.update.taken_step import TakenStep


def method_behind(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step of ``optimizer`` without hooks; None where pieces cannot be put together for it."""
    kind = type(optimizer)
    method = unhooked(kind.step)
    own = method is not None and written_in(method, "torch.optim")
    return method if kind in ELEMENTWISE and own else None


def unhooked(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that torch has wrapped in hooks to make ``step``; None unless it is wrapped in them once."""
    method: Any = getattr(step, "__wrapped__", None)
    once = getattr(step, "hooked", False) and not getattr(method, "hooked", False)
    return method if once else None


def written_in(method: Callable[..., Any], module: str) -> bool:
    """Whether the code of ``method`` is of ``module`` or a module below it, and all that wraps it is torch's.

    A patch may do anything, and ``functools.wraps`` gives it the names of what it wraps, but not the globals.
    """
    layer: Any = method
    while hasattr(layer, "__wrapped__"):
        if not getattr(layer, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        layer = layer.__wrapped__
    name: str = getattr(layer, "__globals__", {}).get("__name__", "")
    return f"{name}.".startswith(f"{module}.")


class PartedUpdate(TakenStep):
    """Of one optimizer; nothing here is collective."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer) -> None:
        """``optimizer`` has been pointed at the shards of ``units``, the trainable ones."""
        super().__init__(optimizer)
        self._method = method_behind(optimizer)
        self.follow(units)

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on, and groups may be more."""
        self._units = list(units)
        self._capturable = [group.get("capturable") for group in self._optimizer.param_groups]
        # Ids of the pieces in each group, for which the spans were made.
        self._members: list[list[int]] = []
        self._spans: dict[Unit, list[Span]] = {}
        self._prepared: Prepared | None = None  # of the last step, if it may serve again

    def take(self, *, last: bool) -> None:
        """Take the step of the optimizer over all units that have gradients, where it need not be torch's own call.

        It is ``taken`` then: the groups are empty until ``restore``.

        Args:
            last: no hook of the program comes between this and torch's own call.
        """
        if not last:
            return
        groups = self._optimizer.param_groups
        method = self._method
        if method is None or any(group.get("differentiable") for group in groups):
            return
        if torch.is_inference_mode_enabled():
            return  # what is made there has no versions, and no base
        # torch.compile sets this in every group that it steps on by itself.
        if [group.get("capturable") for group in groups] != self._capturable:
            return
        if not self._make_spans():
            return
        self._put_groups_away()
        try:
            for units in self._parts():
                self._take(method, units)
        except BaseException:
            self.restore()
            raise
        self._empty_groups()

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
        self._prepared = None
        self._spans = {unit: _spans_of(unit, group_of) for unit in self._units}
        return True

    def _take(self, method: Callable[[Optimizer], Any], units: Sequence[Unit]) -> None:
        """One call of torch's method."""
        optimizer, prepared = self._optimizer, self._prepared
        states: dict[Any, Any] = optimizer.state
        self._prepared = None  # what is cut off serves no more
        if prepared is None or not prepared.serves(units, states):
            prepared = self._prepare(units, states)
        groups = optimizer.param_groups
        self._empty_groups()
        before: list[State] = []
        try:
            for group_number, piece in prepared.apart:
                groups[group_number]["params"].append(piece)
            for unit, run, long, state in prepared.runs:
                long.grad = run.part_of(unit.gradients.reduced)
                before.append(dict(state))
                if state:  # past what ShardStates asks of each key
                    dict.__setitem__(states, long, state)
                groups[run.group]["params"].append(long)
            method(optimizer)
        finally:
            same = True
            for (_, run, long, _), past in zip(prepared.runs, before, strict=False):
                long.grad = None
                after = dict.pop(states, long, None)
                same = after is not None and run.give(past, after, states) and same
        if same and prepared.note(states, self._counters(units)):
            self._prepared = prepared

    def _prepare(self, units: Sequence[Unit], states: dict[Any, Any]) -> Prepared:
        """What is stepped on as one tensor, and the pieces that are not."""
        spans = [(unit, span) for unit in units for span in self._spans[unit]]
        counters: list[Tensor] = []
        for _, span in spans:
            counters += span.look([dict.get(states, piece) for piece in span.pieces])
        values = values_of(counters)
        prepared = Prepared(units, [piece for _, span in spans for piece in span.pieces])
        for unit, span in spans:
            for run in span.runs(have_gradients(span.pieces), values):
                prepared.add(unit, run)
        return prepared

    def _counters(self, units: Sequence[Unit]) -> list[Tensor]:
        """Vectors of the counters of what was seen before the step."""
        return [base for unit in units for span in self._spans[unit] for base in span.counters]

    def adopt(self) -> None:
        """State was loaded: lay it so that pieces can be one tensor again."""
        self._prepared = None
        if self._method is not None and self._make_spans():
            for spans in self._spans.values():
                for span in spans:
                    span.adopt(self._optimizer.state)

    def forget(self) -> None:
        """State is about to be replaced: let go of its memory."""
        self._prepared = None
        for spans in self._spans.values():
            for span in spans:
                span.forget()


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
