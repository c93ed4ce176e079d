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
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpczero.zero.units.guard import all_have_gradients, have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizers import ELEMENTWISE
from hpczero.zero.update.spans import Run, Span, State, values_of


class TakenStep:
    """Of one optimizer; nothing here is collective."""

    def __init__(self, optimizer: Optimizer) -> None:
        """``optimizer`` has been pointed at shards."""
        self._optimizer = optimizer
        self._put_away: list[list[nn.Parameter]] | None = None

    @property
    def taken(self) -> bool:
        """Whether torch's own call has nothing left to do; until ``restore``."""
        return self._put_away is not None

    def restore(self) -> None:
        """Put the pieces back into their groups; nothing if they are there."""
        if self._put_away is not None:
            for group, pieces in zip(self._optimizer.param_groups, self._put_away, strict=True):
                group["params"] = pieces
            self._put_away = None

    def _put_groups_away(self) -> list[list[nn.Parameter]]:
        """Note what the groups hold, for ``restore``; they hold it still, and may hold other things from here on."""
        self._put_away = [group["params"] for group in self._optimizer.param_groups]
        return self._put_away

    def _empty_groups(self) -> None:
        """The step is taken."""
        for group in self._optimizer.param_groups:
            group["params"] = []


# Prepared: what a step was taken over, and whether the next one may be taken over the same.
#
# Training takes the same step again and again. What a program may have changed meanwhile is looked at in a few passes
# over all pieces; only where something is not as it was are they put together anew (issue 20, 2).

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
