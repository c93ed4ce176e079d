"""BackwardSchedule: from the first node of a backward to the reduction of its gradients.

Owns: when parameters are unsharded for it and resharded, and the order of reductions. Must not know: forwards, hooks on
modules, buffers, MPI. It only calls verbs of units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from hpczero.errors import StepError
from hpczero.zero.calls.backward import BackwardPass, Call, Gradients, current_task
from hpczero.zero.residence import Residence
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.whole import UnitState

IN_FLIGHT = (
    1  # reductions that go on beside the backward, of gradients that leave memory afterwards
)


class Unfrozen(Protocol):
    """Parameters that were unfrozen since the plan was made."""

    def have_gradients(self) -> bool:
        """Whether some have gradients, on this rank."""
        ...

    def after_backward(self) -> None:
        """Called after the reductions of a backward; collective where those are."""
        ...


class BackwardSchedule:
    """Backwards of one model, one at a time. Collective as soon as a unit communicates.

    Attributes:
        sync: whether backward reduces gradients; ``no_sync`` turns it off.
        released: whether the model was given back: graphs of its calls lead nowhere then.
        differentiable: whether the last backward that brought gradients kept its own graph (``create_graph=True``).
        gradients: of every trainable unit: the nodes where autograd adds them up.
        order: trainable units, in the order of reductions.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: dict[Unit, Gradients],
        residence: Residence,
        *,
        gradient_factor: Callable[[], float],
        sharded: bool,
        unfrozen: Unfrozen,
    ) -> None:
        """Not collective.

        Args:
            units: in unit order, the root unit(s) first.
            gradients: of every trainable unit.
            residence: which units are whole.
            gradient_factor: multiplies the sum over ranks at each reduction.
            sharded: whether parameters are given back between uses.
            unfrozen: told of the end of each backward that brings gradients.
        """
        self._unfrozen = unfrozen
        self.sync, self.released, self.differentiable = True, False, False
        self.gradients = gradients
        self.order = [unit for unit in reversed(units) if unit.spec.trainable]
        self._place = {unit: place for place, unit in enumerate(self.order)}  # see ``train``
        self._units = list(units)
        self._residence = residence
        self._gradient_factor = gradient_factor
        self._sharded = sharded
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

    def open_call(self, call: Call, number: int) -> None:
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
        take, whole, sharded = unit.gradients.capture, unit.whole, self._sharded

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
        """Reduce the unit whose turn it is (calls/backward.py: [Note: Order of reductions])."""
        unit = self.order[backward.next]
        backward.next += 1
        self._residence.give_back(unit)
        unit.gradients.reduce(self._gradient_factor())
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
            for unit in self.order:
                unit.gradients.finish()
        self._pass = None
        if brings:
            self._unfrozen.after_backward()

    def _brings_gradients(self, backward: BackwardPass) -> bool:
        """Whether this backward is one of parameters. One of ``torch.autograd.grad`` with respect to inputs is not.

        A rank whose loss reaches none of the parameters counts too, with zeros: the others may have gradients.
        """
        if backward.has_gradients or not backward.reached:
            return backward.has_gradients or self._unfrozen.have_gradients()
        if self._unfrozen.have_gradients():
            return True
        wanted = any(p.requires_grad for unit in self.order for p in unit.parameters)
        return wanted and not any(self.gradients[u].are_in_a_graph() for u in self.order)
