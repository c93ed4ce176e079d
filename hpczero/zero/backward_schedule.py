"""BackwardSchedule: from the first node of a backward to the reduction of its gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from hpczero.errors import StepError
from hpczero.zero.calls.tensors import TooMany, tensors_in
from hpczero.zero.calls.ways import (
    BackwardPass,
    Gradients,
    ModuleCall,
    current_task,
    next_node_number,
)
from hpczero.zero.units.gradients import LeafTurn
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.whole import UnitState

if TYPE_CHECKING:
    from hpczero.zero.sharding import Sharding

# Kept: units that stay whole although their modules have run, and until when.
#
#     backward  results that no hook sees, a second pass over the graph of a backward: until a backward is through, and
#               no graph is left that another backward may need them for
#     graph     a graph made of parameters inside ``gathered``: until the step, or ``gathered`` finds it gone; no hook
#               sees its backward come, nor whether it was the last one
#     call      a block returned a view of memory that ranks share: until no call runs, or, under grad, as ``backward``
#
# An optimizer's step ends those of its units, because it makes other values. A rank may have reasons that others have
# not, such as a hook that logs on rank 0 alone. Reasons therefore decide which memory this rank gives back, and never
# whether the next use is collective.

logger = logging.getLogger("hpczero.schedule")


class KeptUnits:
    """A set of units, in the order in which they came, which is the same on all ranks."""

    def __init__(self, gradients: Mapping[Unit, Gradients]) -> None:
        """An empty set. ``gradients`` are those of every trainable unit, where parameters are sharded."""
        self._gradients = gradients
        # With the calls that live as long as the graphs that need them; where a unit trains, its graphs are found.
        self._for_backward: dict[Unit, weakref.WeakSet[ModuleCall]] = {}
        self._for_graph: dict[Unit, None] = {}
        self._for_call: dict[Unit, None] = {}
        self._told: set[Unit] = set()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._for_backward or unit in self._for_graph or unit in self._for_call

    @property
    def units(self) -> list[Unit]:
        """All units of the set."""
        return list(dict.fromkeys([*self._for_graph, *self._for_backward, *self._for_call]))

    def for_backward(self, units: Iterable[Unit], call: ModuleCall | None = None) -> None:
        """Keep units until a backward is over, and as long as graphs are left that lead to them: those of ``call``."""
        for unit in units:
            calls = self._for_backward.setdefault(unit, weakref.WeakSet())
            if call is not None:
                calls.add(call)

    def graphs_since(self, number: int) -> list[bool]:
        """Units that graphs newer than node ``number``, or graphs that keep them already, may lead to.

        An older graph that still exists counts too if any was made since, because the two cannot be told apart.
        """
        new = next_node_number() != number
        return [
            (new or unit in self._for_graph) and gradients.are_in_a_graph()
            for unit, gradients in self._gradients.items()
        ]

    def for_graphs(self, found: Iterable[int]) -> None:
        """Keep what all ranks together found by ``graphs_since``, until the step or the next call of this."""
        pairs = zip(self._gradients, found, strict=True)
        self._for_graph = {unit: None for unit, kept in pairs if kept}

    def for_call(self, unit: Unit) -> None:
        """Keep units until ``calls_are_through``."""
        self._for_call[unit] = None

    def tell(self, units: Sequence[Unit]) -> None:
        """Say once that results which no hook sees cost memory."""
        for unit in units:
            if unit not in self._told:
                self._told.add(unit)
                logger.warning(
                    "unit %r stays whole until backward is through, which takes memory: it has results that are "
                    "neither in what it returns nor in its arguments or attributes, or it computed something after "
                    "them that needs a gradient. Return them; compute what is only logged under torch.no_grad()",
                    unit.spec.name,
                )

    def calls_are_through(self) -> list[Unit]:
        """Note that no call runs any more; returns units that need not stay whole."""
        if not self._for_call:
            return []
        ended, self._for_call = self._for_call, {}
        return [unit for unit in ended if unit not in self]

    def backward_is_through(self) -> None:
        """Forget the units of ``for_backward`` that no graph leads to: a backward is over, and others may come.

        Whether it was the one that they were kept for, nobody can tell.
        """
        for unit, calls in list(self._for_backward.items()):
            gradients = self._gradients.get(unit)
            if not (calls or (gradients is not None and gradients.are_in_a_graph())):
                self._for_backward.pop(unit)

    def clear(self, units: Collection[Unit] | None = None) -> list[Unit]:
        """Empty the set, or take ``units`` out of it; returns what was kept of them."""
        ended = [unit for unit in self.units if units is None or unit in units]
        for kind in (self._for_backward, self._for_graph, self._for_call):
            for unit in ended:
                kind.pop(unit, None)
        return ended


# Prefetch: which units are used next, as the pass before has shown.
#
# To unshard a unit early is to make a collective call early. Every rank must do so at the same place, or the order of
# calls differs. The forecast therefore uses nothing but the units that this model's passes have used, which are the
# same on all ranks. It never uses clocks, or what has arrived. A pass that departs from the one before gets no forecast
# from there on.


class Prefetch:
    """Forecast for one model. Forward and backward passes are compared with earlier ones of their kind.

    Units come as modules use them: all those of one module together.
    """

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[Unit, ...]]] = {}
        self._pass: str | None = None
        self._seen: list[tuple[Unit, ...]] = []
        self._as_before = False
        self._early: set[Unit] = set()

    def begin(self, kind: str) -> None:
        """Begin a pass. One that has not ended is forgotten.

        Args:
            kind: passes of the same kind resemble each other.
        """
        self._pass, self._seen, self._as_before = kind, [], True

    def next_after(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Note that ``units`` are used now; returns those that will be used next, none where that is unknown."""
        used = tuple(units)
        self._early.difference_update(used)
        if self._pass is None or not used or self._seen[-1:] == [used]:
            return ()
        record, place = self._records.get(self._pass, []), len(self._seen)
        self._seen.append(used)
        self._as_before = self._as_before and record[place : place + 1] == [used]
        if not self._as_before or place + 1 >= len(record):
            return ()
        self._early.update(record[place + 1])
        return record[place + 1]

    def end(self) -> list[Unit]:
        """End the pass. Returns the units that were forecast and then not used, in the order of the record."""
        if self._pass is None:
            return []
        recorded = dict.fromkeys(u for used in self._records.get(self._pass, []) for u in used)
        unused = [unit for unit in recorded if unit in self._early]
        self._early.clear()
        self._records[self._pass], self._pass = self._seen, None
        return unused


# ReadAhead: whose values are read from where they rest, before they are used.
#
# Reading is this rank's own business: a forecast that is wrong costs time, and nobody else notices. It may therefore go
# further ahead than `prefetch`, which is a collective, and from the end of a forward into the backward that follows it:
# values do not change between the two. After a backward comes a step, which changes them.

FORWARD, BACKWARD = "forward", "backward"  # kinds of passes


class ReadAhead:
    """Forecast for one model; forward and backward passes each follow their own kind."""

    def __init__(self, units: int) -> None:
        """``units``: how many are read ahead."""
        self._units = units
        self._records: dict[str, list[Unit]] = {}
        self._kind: str | None = None
        self._seen: list[Unit] = []

    def begin(self, kind: str) -> None:
        """A pass begins, which resembles others of its ``kind``."""
        self.end()
        self._kind, self._seen = kind, []
        for unit in self._records.get(kind, [])[: self._units]:
            unit.rest.start()

    def used(self, unit: Unit) -> None:
        """``unit`` is being used: those behind it are wanted next."""
        if self._seen[-1:] == [unit]:
            return
        place = len(self._seen)
        self._seen.append(unit)
        record = self._records.get(self._kind or "", [])
        if record[place : place + 1] == [unit]:
            coming = record[place + 1 :]
            if self._kind == FORWARD and torch.is_grad_enabled():
                coming = coming + self._records.get(BACKWARD, [])
            for following in coming[: self._units]:
                following.rest.start()

    def end(self) -> None:
        """The pass is through."""
        if self._kind is not None and self._seen:
            self._records[self._kind] = self._seen
        self._kind = None


class Residence:
    """Residence of the units of one model.

    Attributes:
        kept: units that stay whole for now.
    """

    def __init__(self, sharding: Sharding, gradients: Mapping[Unit, Gradients]) -> None:
        """Not collective. ``gradients`` are those of every trainable unit."""
        sharded, read_ahead = sharding.plan.stage.shards_parameters, sharding.away.read_ahead
        self._units = list(sharding.units)
        self.kept = KeptUnits(gradients if sharded else {})
        ahead = sharded and sharding.collectives.footprint.overlap
        self._prefetch = Prefetch() if ahead else None
        self._read_ahead = ReadAhead(read_ahead) if read_ahead else None
        self._stays = False  # see keep_whole

    def begin_pass(self, kind: str) -> None:
        """Note that a forward or a backward begins, as ``kind`` says."""
        if self._prefetch is not None:
            self._prefetch.begin(kind)
        if self._read_ahead is not None:
            self._read_ahead.begin(kind)

    def give_back(self, unit: Unit) -> None:
        """Reshard ``unit``, unless there is a reason to keep it whole. Nothing uses it now."""
        if not self._stays:
            unit.reshard(retain=unit in self.kept)

    def make_whole(self, units: Sequence[Unit]) -> None:
        """Wait until ``units`` are whole, but for tables. The unshard of what comes after them has then started."""
        units = [unit for unit in units if not unit.whole.by_rows]
        if not units:
            return
        for unit in units:
            unit.unshard()
        if self._read_ahead is not None:
            for unit in units:
                self._read_ahead.used(unit)
        for unit in units:
            unit.whole.wait_for_unshard()
        if self._prefetch is not None:
            # After the wait, peers are at most one module behind. So no rank holds more than the plan says.
            for following in self._prefetch.next_after(units):
                following.unshard()

    def end_pass(self) -> None:
        """Reshard what was unsharded ahead and then not used."""
        if self._prefetch is not None:
            for unit in self._prefetch.end():
                self.give_back(unit)
        if self._read_ahead is not None:
            self._read_ahead.end()

    def calls_are_through(self) -> None:
        """Note that no call runs any more."""
        for unit in self.kept.calls_are_through():
            unit.reshard()

    def lend(self, units: Sequence[Unit], output: Any) -> None:
        """Keep a unit whole if ``output`` may be a view of its parameters (units/whole.py: [Note: Kept views])."""
        lost = [unit for unit in units if not unit.whole.lasts]
        if not lost:
            return
        try:
            outputs = list(tensors_in(output))
            seen = [unit for unit in lost if any(map(unit.whole.is_seen_by, outputs))]
        except TooMany:
            seen = lost
        for unit in seen:
            unit.whole.lend()
            if unit.whole.shared and torch.is_grad_enabled():
                self.kept.for_backward([unit])
            elif unit.whole.shared:
                self.kept.for_call(unit)

    @contextmanager
    def keep_whole(self) -> Iterator[None]:
        """Context: units that are unsharded stay whole until its end or the next step.

        Several micro batches then unshard parameters once, where a pipeline stage would do so for every forward and
        every backward. The price is the memory of whole parameters. All ranks enter and leave together.
        """
        before, self._stays = self._stays, True
        try:
            yield
        finally:
            self._stays = before
            if not before:
                self._reshard()

    def end_step(self, units: Collection[Unit] | None = None) -> list[Unit]:
        """Reshard whatever was kept, because values are about to change.

        A backward that has not come no longer matters.

        Args:
            units: whose values change; None: all.

        Returns:
            Those of them that were kept.
        """
        ended = self.kept.clear(units)
        for unit in ended:
            unit.reshard()
        if self._stays:
            self._reshard()
        return ended

    def reset(self) -> None:
        """Forget an interrupted forward or backward, and reshard all units."""
        self.kept.clear()
        self._reshard()

    def leave_pass(self) -> None:
        """Forget a forward that was left: its ranks may have come to different units between the same collectives."""
        self.kept.calls_are_through()
        self._reshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard(retain=unit in self.kept)


# Reductions that go on beside the backward, of gradients that leave memory afterwards.
IN_FLIGHT = 1


class BackwardSchedule:
    """Backwards of one model, one at a time. Collective as soon as a unit communicates.

    Attributes:
        sync: whether backward reduces gradients; ``no_sync`` turns it off.
        turn: which leaves of a step this backward is of; None where none are summed.
        released: whether the model was given back: graphs of its calls lead nowhere then.
        differentiable: whether the last backward that brought gradients kept its own graph (``create_graph=True``).
        gradients: of every trainable unit: the nodes where autograd adds them up.
        order: trainable units, in the order of reductions.
    """

    def __init__(
        self, sharding: Sharding, gradients: dict[Unit, Gradients], residence: Residence
    ) -> None:
        """Not collective."""
        units, self._unfreezing = sharding.units, sharding.unfreezing
        self._gradient_factor = sharding.gradient_factor
        self._sharded = sharding.plan.stage.shards_parameters
        self.sync, self.released, self.differentiable = True, False, False
        self.turn: LeafTurn | None = None
        self.gradients = gradients
        self.order = [unit for unit in reversed(units) if unit.spec.trainable]
        self._place = {unit: place for place, unit in enumerate(self.order)}  # see ``train``
        self._units = list(units)
        self._residence = residence
        self._pass: BackwardPass | None = None

    def train(self, unit: Unit) -> None:
        """``unit``, one of the frozen ones, trains from now on. No backward runs."""
        self.gradients[unit] = Gradients(unit.parameters)
        self.order = [each for each in reversed(self._units) if each.spec.trainable]
        self._place.update({each: place for place, each in enumerate(self.order)})

    @property
    def runs(self) -> bool:
        """Whether a backward is running, or was interrupted."""
        return self._pass is not None

    def reset(self) -> None:
        """Forget an interrupted backward, with what autograd has left on parameters where no hook came to take it."""
        self._pass = None
        for unit in self.order:
            unit.gradients.finish()
        for unit in self._units:
            unit.whole.watch.forget_own_gradients()

    def open_call(self, call: ModuleCall, number: int) -> None:
        """Unshard the units of ``call``: a node behind its results is about to run."""
        backward = self.current()
        backward.reached = True
        self._node_runs(backward, number, call.thread)
        for each in (*call.around, call):
            if each not in backward.opened:
                backward.opened.append(each)
                if backward.differentiable:  # the graph of this backward will need them too
                    self._residence.kept.for_backward(each.units, each)
                self._residence.make_whole(each.units)

    def input_node_runs(self, number: int, thread: int) -> None:
        """Handle a node that made an argument of a call and is about to run.

        The backward may be one of another model alone.
        """
        if self._pass is not None and self._pass.task == current_task():
            self._node_runs(self._pass, number, thread)

    def _node_runs(self, backward: BackwardPass, number: int, thread: int) -> None:
        """Reshard and reduce what is no longer needed, now that a node of this number is about to run."""
        for call in backward.passed(number, thread):
            for unit in call.units:
                if backward.is_through(unit):
                    self._residence.give_back(unit)
        self._reduce_what_is_due(backward)

    def _reduce_what_is_due(self, backward: BackwardPass) -> None:
        while (
            self.sync
            and backward.has_gradients
            and backward.next < len(self.order)
            and backward.is_through(self.order[backward.next])
        ):
            self._reduce_next(backward)

    def capture(self, unit: Unit, position: int) -> Callable[[Tensor], None]:
        """Hook of one parameter. Autograd calls it when it has left the gradient there."""
        name = unit.spec.layout.slots[position].name
        places, task = self._place, torch._C._current_graph_task_id
        take, whole = unit.gradients.capture, unit.whole
        sharded = self._sharded and not whole.by_rows

        # Runs for every parameter in every backward: what can be looked up before is.
        def hook(parameter: Tensor) -> None:
            backward = self._pass
            if backward is None or backward.task != task():
                backward = self.current()
            if sharded and whole.state is UnitState.SHARDED:
                raise StepError(
                    f"the gradient of {name!r} was computed while its unit {unit.spec.name!r} was sharded: backward "
                    "came to it by a way that no hook sees. Return what the loss is made of from the module, or leave "
                    "it in its arguments or attributes"
                )
            if places[unit] < backward.next:
                self.gradients[unit].check_known(position, name)
                raise StepError(
                    f"the gradient of {name!r} arrived after its unit {unit.spec.name!r} was reduced: a module outside "
                    "the unit uses the parameter. Make the module that uses it the unit (rule=...), or leave the "
                    "parameter to the root unit"
                )
            take(position, parameter, not self.sync)
            if backward.arrived(unit) and backward.is_through(unit):
                self._residence.give_back(unit)
                self._reduce_what_is_due(backward)

        # Autograd keeps hooks where no garbage collector looks, and this one leads to the model.
        self.gradients[unit].hooks.append(hook)
        held = ref(hook)

        def weak(parameter: Tensor) -> None:
            if (found := held()) is not None:
                found(parameter)

        return weak

    def current(self) -> BackwardPass:
        """The backward that is running. The first call starts it, and asks autograd for a call at its end."""
        task = current_task()
        assert task is not None, "called from autograd nodes and gradient hooks only"
        if self.released:
            raise StepError(
                "backward of a graph from before hpczero.release(model), which has taken the shards apart; call "
                "backward first, or forward again"
            )
        if self._pass is not None and self._pass.task != task:
            raise StepError(
                "another backward of this model has not finished. Either it ended in an exception, and its "
                "gradients are lost: call optimizer.zero_grad() before the next backward. Or this one runs inside "
                "it, which reentrant activation checkpointing and autograd Functions do that call modules in their "
                "backward (reversible blocks): use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._pass is None:
            self._pass = BackwardPass(task, self.gradients)
            self._residence.begin_pass("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return self._pass

    def _reduce_next(self, backward: BackwardPass) -> None:
        """Reduce the unit whose turn it is (calls/ways.py: [Note: Order of reductions])."""
        unit = self.order[backward.next]
        backward.next += 1
        self._residence.give_back(unit)
        unit.gradients.reduce(self._gradient_factor(), self.turn)
        resident = unit.gradients.rest.resident
        if not resident:  # what lies elsewhere leaves memory as soon as it is whole
            backward.reducing.append(unit)
        while len(backward.reducing) > IN_FLIGHT - resident:
            backward.reducing.popleft().gradients.finish()

    def _end(self) -> None:
        backward = self._pass
        assert backward is not None, "the callback belongs to the backward that queued it"
        self._residence.end_pass()
        if backward.has_gradients:
            self.differentiable = backward.differentiable
        if not backward.differentiable:
            self._residence.kept.backward_is_through()
        for unit in self._units:
            self._residence.give_back(unit)
        brings = self.sync and self._brings_gradients(backward)
        if brings:
            while backward.next < len(self.order):
                self._reduce_next(backward)
            # Also where leaves follow: ranks may reach other units first in the next one, whose peers would wait.
            for unit in self.order:
                unit.gradients.finish()
        self._pass = None
        if brings:
            self._unfreezing.after_backward()

    def _brings_gradients(self, backward: BackwardPass) -> bool:
        """Whether this backward is one of parameters. One of ``torch.autograd.grad`` with respect to inputs is not.

        A rank whose loss reaches none of the parameters counts too, with zeros: the others may have gradients.
        """
        if backward.has_gradients or not backward.reached:
            return backward.has_gradients or self._unfreezing.have_gradients()
        if self._unfreezing.have_gradients():
            return True
        wanted = any(p.requires_grad for unit in self.order for p in unit.parameters)
        return wanted and not any(self.gradients[u].are_in_a_graph() for u in self.order)
