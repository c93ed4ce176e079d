"""Schedule: when units act.

Owns: the hooks on modules, parameters and autograd nodes. Must not know: buffers, MPI, optimizers; it only calls verbs
of units.

    forward   pre-hook: unshard, wait | module runs | post-hook: reshard
    backward  a module's last node is about to run: unshard, wait | its backward; gradients are captured
              | a node from before the module is about to run: reshard, reduce
    end       one callback: whatever has not been reduced

What a module is given and what it returns stay the caller's: nothing is copied, wrapped or replaced (issue 15).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.zero.calls.backward import (
    BackwardPass,
    Call,
    Gradients,
    current_task,
    next_node_number,
)
from hpczero.zero.calls.kept import Kept
from hpczero.zero.calls.prefetch import Prefetch
from hpczero.zero.calls.surroundings import refuse_mutation
from hpczero.zero.calls.tensors import Attributes, TooMany, tensors_in
from hpczero.zero.calls.untraced import untraced
from hpczero.zero.calls.ways import Ways, inside
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.whole import UnitState


class Schedule:
    """Drives the units of one model. Forward and backward are collective as soon as a unit communicates.

    Attributes:
        sync: whether backward reduces gradients; ``no_sync`` turns it off.
        kept: units that stay whole for now.
        differentiable: whether the last backward to bring gradients kept its own graph (``create_graph=True``).
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        gradient_factor: Callable[[], float],
        sharded: bool,
        ahead: bool = False,
    ) -> None:
        """Register the hooks.

        Args:
            model: the module whose calls start a forward.
            units: in unit order, the root unit(s) first.
            gradient_factor: what the sum over ranks is multiplied by at each reduction.
            sharded: whether parameters are given back between uses.
            ahead: start to make the next unit whole while one is used.
        """
        self.sync, self.differentiable = True, False
        self._units = list(units)
        self._order = [unit for unit in reversed(self._units) if unit.spec.trainable]
        self._place = {unit: place for place, unit in enumerate(self._order)}
        self._gradients = {unit: Gradients(unit.parameters) for unit in self._order}
        self._gradient_factor = gradient_factor
        self._sharded = sharded
        self._prefetch = Prefetch() if ahead else None
        self._around: dict[nn.Module, tuple[Callable[..., None], Callable[..., None]]] = {}
        self._running: dict[nn.Module, list[Call]] = {}
        self._uncalled: dict[Unit, set[nn.Module]] = {}
        self.kept = Kept(self._gradients if sharded else {})
        self._ways = Ways(self._open_call, self._input_node_runs)
        self._backward: BackwardPass | None = None
        self._handles: list[RemovableHandle] = []
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = {unit: {modules[name] for name in unit.spec.modules} for unit in units}
        self._register(model)

    def remove(self) -> None:
        """Take the hooks away; the model must not be used through this schedule afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ways.remove()
        self._gradients.clear()

    def reset(self) -> None:
        """Forget an interrupted forward or backward and give gathered parameters back."""
        self._backward = None
        for unit in self._order:
            unit.gradients.finish()
        self._running.clear()
        self._uncalled.clear()
        self.kept.clear()
        for unit in self._units:
            unit.reshard()

    def give_back(self) -> None:
        """Give back what was kept whole for a backward that did not come; values are about to change."""
        for unit in self.kept.clear():
            unit.reshard()

    def parameters_changed(self) -> None:
        """A program had access to the parameters themselves."""
        for gradients in self._gradients.values():
            gradients.renew()

    def is_in_graph_since(self, number: int) -> bool:
        """Whether parameters are in a graph, and any was made since node ``number``; this rank's own."""
        graphs = (gradients.are_in_a_graph() for gradients in self._gradients.values())
        return next_node_number() != number and any(graphs)

    def _register(self, model: nn.Module) -> None:
        users: dict[nn.Module, list[Unit]] = {model: []}
        for unit in self._units:
            for module in sorted(self._modules[unit], key=id):
                users.setdefault(module, []).append(unit)
        for module, units in users.items():
            is_root = module is model
            inner = list(inside(module, users))
            before = self._pre_forward(units, inner, is_root=is_root)
            after = self._post_forward(units, Attributes(module), is_root=is_root)
            self._around[module] = before, after
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]
        for unit in self._order:
            for position, parameter in enumerate(unit.parameters):
                hook = self._capture(unit, position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The model and the modules that units are made of."""
        return self._around.keys()

    @contextmanager
    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[list[Any]]:
        """What runs inside counts as a call of ``module``, one of ``modules``; it puts its output into the list."""
        before, after = self._around[module]
        output: list[Any] = []
        before(module, args, kwargs)
        try:
            yield output
        finally:
            after(module, args, kwargs, output)

    # --- forward -------------------------------------------------------------------------------------------------

    def _pre_forward(
        self, units: Sequence[Unit], inner: Sequence[nn.Module], *, is_root: bool
    ) -> Callable[..., None]:
        @untraced
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current_task() is not None:  # recomputation: the call is open, or will be
                self._current_backward()
                self._make_whole(units)
                return
            for unit in units:
                unit.check_values()
            if self._sharded:
                refuse_mutation(module)
            if is_root and self._prefetch is not None:
                self._prefetch.begin("forward")
            self._make_whole(units)
            if self._sharded and torch.is_grad_enabled():
                self._ways.watch_input(args, kwargs)
                self._ways.watch_hooked(module, inner, self._running)
            running = [call for calls in self._running.values() for call in calls]
            self._running.setdefault(module, []).append(Call(units, running))
            for unit in units:
                self._uncalled.setdefault(unit, set(self._modules[unit]))

        return hook

    def _post_forward(
        self, units: Sequence[Unit], attributes: Attributes, *, is_root: bool
    ) -> Callable[..., None]:
        @untraced
        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any = None,
        ) -> None:
            calls = self._running.get(module)
            if current_task() is not None or not calls:
                return  # recomputation (the unit stays whole until its backward is through), or reset
            call = calls.pop()
            if torch.is_grad_enabled() and (self._sharded or is_root):
                results = (output, args, kwargs, attributes.values())
                if not self._is_watched(call, results) and self._sharded:
                    self.kept.for_backward(units)
                    if sys.exc_info()[1] is None:  # else it is the call's end that left no results
                        self.kept.tell(units)
            if self._sharded:
                self._lend(units, output)
            for unit in units:
                uncalled = self._uncalled.get(unit, set())
                uncalled.discard(module)
                if not uncalled and not calls:
                    self._uncalled.pop(unit, None)
                    self._give_back(unit)
            if is_root and not calls:
                for unit in self._uncalled:  # some of their modules were not called this time
                    self._give_back(unit)
                self._uncalled.clear()
                self._end_pass()
            if self._sharded and not any(self._running.values()):
                for unit in self.kept.calls_are_through():
                    unit.reshard()

        return hook

    def _lend(self, units: Sequence[Unit], output: Any) -> None:
        """What a module returns may be a view of its parameters. See whole.[Note: Kept views]."""
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

    def _is_watched(self, call: Call, results: tuple[Any, ...]) -> bool:
        """Have the ways into ``call`` watched; whether there are no others. See ways.[Note: The ways into a call]."""
        try:
            if self._ways.watch_results(call, results):
                return True
        except TooMany:
            return False
        trainable = (unit for unit in call.units if unit.spec.trainable)
        return not any(self._gradients[unit].are_in_a_graph() for unit in trainable)

    def _give_back(self, unit: Unit) -> None:
        unit.reshard(retain=unit in self.kept)

    def _make_whole(self, units: Sequence[Unit]) -> None:
        """Wait until ``units`` are whole; what comes after them is on its way then."""
        for unit in units:
            unit.unshard()
        for unit in units:
            unit.wait_for_unshard()
        if self._prefetch is not None:
            # Not before the wait, which proves that peers are at most a unit behind: no more is held than planned.
            for unit in units:
                following = self._prefetch.next_after(unit)
                if following is not None:
                    following.unshard()

    def _end_pass(self) -> None:
        """Give back what was made whole ahead and then not used."""
        if self._prefetch is not None:
            for unit in self._prefetch.end():
                self._give_back(unit)

    # --- backward ------------------------------------------------------------------------------------------------

    def _open_call(self, call: Call, number: int) -> None:
        """A node behind the results of ``call`` is about to run: make its parameters whole."""
        backward = self._current_backward()
        backward.reached = True
        self._node_runs(backward, number, call.thread)
        for each in (*call.around, call):
            if each not in backward.opened:
                backward.opened.append(each)
                if backward.differentiable:  # the graph of this backward will need them too
                    self.kept.for_backward(each.units)
                self._make_whole(each.units)

    def _input_node_runs(self, number: int, thread: int) -> None:
        """A node that made an argument of a call is about to run, perhaps in a backward of another model alone."""
        if self._backward is not None and self._backward.task == current_task():
            self._node_runs(self._backward, number, thread)

    def _node_runs(self, backward: BackwardPass, number: int, thread: int) -> None:
        """A node of this number is about to run: what it proves to be through is given back and reduced."""
        for call in backward.passed(number, thread):
            for unit in call.units:
                if backward.is_through(unit):
                    self._give_back(unit)
        self._reduce_what_is_due(backward)

    def _reduce_what_is_due(self, backward: BackwardPass) -> None:
        while (
            self.sync
            and backward.has_gradients
            and backward.next < len(self._order)
            and backward.is_through(self._order[backward.next])
        ):
            self._reduce_next(backward)

    def _capture(self, unit: Unit, position: int) -> Callable[[Tensor], None]:
        name = unit.spec.layout.slots[position].name
        gradients, place, task = unit.gradients, self._place[unit], torch._C._current_graph_task_id

        # Runs for every parameter in every backward: what can be looked up before is.
        def hook(parameter: Tensor) -> None:
            backward = self._backward
            if backward is None or backward.task != task():
                backward = self._current_backward()
            if self._sharded and unit.whole.state is UnitState.SHARDED:
                raise StepError(
                    f"the gradient of {name!r} was computed while its unit {unit.spec.name!r} was sharded: backward "
                    "came to it by a way that no hook sees. Return what the loss is made of from the module, or leave "
                    "it in its arguments or attributes"
                )
            if place < backward.next:
                self._gradients[unit].check_known(position, name)
                raise StepError(
                    f"the gradient of {name!r} arrived after its unit {unit.spec.name!r} was reduced: a module outside "
                    "the unit uses the parameter. Make the module that uses it the unit (rule=...), or leave the "
                    "parameter to the root unit"
                )
            gradients.capture(position, accumulating=not self.sync)
            if backward.arrived(unit) and backward.is_through(unit):
                self._give_back(unit)
                self._reduce_what_is_due(backward)

        return hook

    def _current_backward(self) -> BackwardPass:
        """The backward that is running; the first to ask starts it and asks for its end to be called."""
        task = current_task()
        assert task is not None, "called from autograd nodes and gradient hooks only"
        if self._backward is not None and self._backward.task != task:
            raise StepError(
                "another backward of this model has not finished. Either it ended in an exception, and its "
                "gradients are lost: call optimizer.zero_grad() before the next backward. Or this one runs inside "
                "it, which reentrant activation checkpointing and autograd Functions do that call modules in their "
                "backward (reversible blocks): use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._backward is None:
            self._backward = BackwardPass(task, self._gradients)
            if self._prefetch is not None:
                self._prefetch.begin("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _reduce_next(self, backward: BackwardPass) -> None:
        """Reduce the unit whose turn it is; why in turn: backward.[Note: Order of reductions]."""
        unit = self._order[backward.next]
        backward.next += 1
        self._give_back(unit)
        unit.gradients.reduce(self._gradient_factor())

    def _end_backward(self) -> None:
        backward = self._backward
        assert backward is not None, "the callback belongs to the backward that queued it"
        self._end_pass()
        if backward.has_gradients:
            self.differentiable = backward.differentiable
        if not backward.differentiable:
            self.kept.backward_is_through()
        for unit in self._units:
            self._give_back(unit)
        if self.sync and self._brings_gradients(backward):
            while backward.next < len(self._order):
                self._reduce_next(backward)
            for unit in self._order:
                unit.gradients.finish()
        self._backward = None

    def _brings_gradients(self, backward: BackwardPass) -> bool:
        """Whether this backward is one of parameters; torch.autograd.grad with respect to inputs is not.

        A rank whose loss came to none of the parameters counts too, with zeros: the others may have gradients.
        """
        if backward.has_gradients or not backward.reached:
            return backward.has_gradients
        wanted = any(p.requires_grad for unit in self._order for p in unit.parameters)
        return wanted and not any(self._gradients[u].are_in_a_graph() for u in self._order)

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running, or was interrupted."""
        return self._backward is not None
