"""Schedule: when units act.

    forward   pre-hook: unshard, wait | module runs | post-hook: reshard
    backward  the node that a module made last, the first to run in backward, is about to run: unshard, wait
              | its backward; gradients are captured
              | a node from before the module is about to run: reshard, reduce
    end       one callback: whatever has not been reduced

Ranks of one host share each unit's buffer (transport ``window``). It lasts, and the fp32 master is this rank's slice of
it. Parameters are then gathered once, after the step; unshard only waits, and reshard only closes guards.

What a module is given and what it returns stay the caller's: nothing is copied, wrapped or replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError
from hpczero.zero.backward_schedule import BackwardSchedule, Residence
from hpczero.zero.calls.tensors import Attributes, TooMany
from hpczero.zero.calls.ways import (
    Gradients,
    ModuleCall,
    Ways,
    current_task,
    inside,
    next_node_number,
    unseen,
    untraced,
)
from hpczero.zero.units.rows import TableParameters
from hpczero.zero.units.unit import Unit

if TYPE_CHECKING:
    from hpczero.zero.sharding import Sharding

# A forward that an exception has left.
#
# The program may catch the exception and call the model again. Where all ranks do, as after memory ran out on all of
# them, nothing is lost. Where one does, its next call is another than that of the others, and ``comm.Order`` stops it.

NEAR = 8  # frames between a hook and torch's call of it


class LeftForward:
    """Watches the forwards of one model. Not collective."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._runs = self._was_left = False
        self._begun_at = 0  # fingerprint
        self._frame: FrameType | None = None  # of the call of the model, where torch makes it
        self._handled: BaseException | None = None

    def number(self) -> None:
        """Count a forward that begins, for who exchanges activations in it."""
        self._comm.group.forwards.begin()

    def is_lost(self) -> bool:
        """Whether the forward that was begun last was left without ``end``.

        Torch runs forward hooks after an ``Exception`` only. After a KeyboardInterrupt nobody calls ``end``.
        """
        if not self._runs or self._frame is None or _is_on_stack(self._frame):
            return False
        self._runs, self._was_left = False, self._comm.calls.fingerprint != self._begun_at
        return True

    def begin(self) -> bool:
        """A forward begins.

        Returns:
            Whether one was left after a collective: ranks may have come to different units in it.
        """
        left, self._was_left = self._was_left, False
        if not self._runs:  # else it is the model that calls itself
            self._frame = _frame_of_call()
        self._runs = True
        self._begun_at = self._comm.calls.fingerprint
        self._handled = sys.exc_info()[1]  # the program's: it calls the model while it handles it
        return left

    def end(self) -> None:
        """The forward has ended, or an exception is leaving it."""
        error, handled = sys.exc_info()[1], self._handled
        if error is not None and error is not handled and not getattr(error, "agreed", False):
            self._was_left = self._comm.calls.fingerprint != self._begun_at
        self._runs, self._handled, self._frame = False, None, None


def _frame_of_call() -> FrameType | None:
    """Frame of torch's own that lasts as long as the call of the module whose hook runs; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(NEAR):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name == "_call_impl":
            return frame
    return None


def _is_on_stack(frame: FrameType) -> bool:
    seen: FrameType | None = sys._getframe(1)
    while seen is not None and seen is not frame:
        seen = seen.f_back
    return seen is frame


# What surrounds a call of a zeroified model: autocast, transforms of ``torch.func``, forward-mode derivatives.
#
# ``torch.autocast`` keeps the casts of weights until its outermost block ends, with the graph they came from. In a
# block around several steps the next forward would use the weights of before the step, and its gradients would arrive
# through the earlier forward. Every forward of the model, and the step, therefore clear this cache. Where gradients are
# disabled, every module with hooks clears it too, so that the casts of a model never lie in memory together.


class Surroundings:
    """Forward pre-hooks on the model and on every module that has hooks of the schedule."""

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Register the hooks, after those of the schedule, so that they run first."""
        self._model = model
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.look, prepend=True) for module in modules
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @untraced
    def look(self, module: nn.Module, args: tuple[Any, ...] = ()) -> None:
        """Before a call of ``module``; StepError inside a transform, or where ``torch.jit.trace`` records the call."""
        if torch._C._get_tracing_state() is not None:
            raise StepError(
                f"{type(module).__name__} of a zeroified model was called by torch.jit.trace, which would record "
                "parameters without the hooks that gather them. Trace a plain model that has loaded "
                "hpczero.full_state_dict(model); torch.compile works on zeroified ones"
            )
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing and (module is self._model or not torch.is_grad_enabled()):
            torch.clear_autocast_cache()
        refuse_transforms(module)


def refuse_transforms(module: nn.Module) -> None:
    """Raise StepError for derivatives that would bypass the hooks that gather, capture and reduce."""
    if torch._C._are_functorch_transforms_active():
        stack = torch._C._functorch.get_interpreter_stack() or ()
        kinds = {str(level.key()).rpartition(".")[2] for level in stack}
        if kinds != {"Vmap"} or torch.is_grad_enabled():
            raise StepError(
                f"{type(module).__name__} was called inside a transform of torch.func ({', '.join(sorted(kinds))}), "
                "which takes derivatives past the hooks of a zeroified model. Use loss.backward(), torch.autograd.grad "
                "with respect to inputs, or torch.autograd.functional.jacobian; torch.func.vmap works under "
                "torch.no_grad()"
            )
    if forward_ad._current_level >= 0 and torch.is_grad_enabled():
        raise StepError(
            f"{type(module).__name__} was called inside torch.autograd.forward_ad.dual_level() with gradients enabled, "
            "and the hooks of a zeroified model have no forward derivative; call it under torch.no_grad(), where "
            "tangents with respect to inputs are right"
        )


def refuse_mutation(module: nn.Module) -> None:
    """Raise StepError in a mode where autograd keeps saved tensors by memory, which sharded parameters give back."""
    if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled and torch.is_grad_enabled():
        raise StepError(
            f"{type(module).__name__} was called inside torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
            "needs the memory of parameters that a model at stage 3 gives back between uses. Leave it out and change "
            "a clone of the saved tensor, or train at stage 2"
        )


# transformers (5.23) asks its modules for this before a rank leaves a layer out, or ends a text before the others: with
# parameters that are gathered together, as with FSDP and ZeRO-3, every rank must run every layer.
RUNS_ALL = "_is_fsdp_managed_module"


def answer_transformers(model: nn.Module, *, runs_all: bool) -> list[nn.Module]:
    """Modules of ``model`` that transformers made, which say from now on whether every rank runs every layer."""
    asked = [
        module
        for module in model.modules()
        if any(kind.__module__.startswith("transformers") for kind in type(module).__mro__)
    ]
    for module in asked:
        module.__dict__.pop(RUNS_ALL, None)
        if runs_all:
            module.__dict__[RUNS_ALL] = True
    return asked


class Schedule:
    """Drives the units of one model. Forward and backward are collective as soon as a unit communicates.

    Attributes:
        residence: which units are whole.
        backward: what runs from the first node of a backward on.
    """

    def __init__(self, sharding: Sharding) -> None:
        """Register the hooks."""
        model, units = sharding.model, sharding.units
        trained = [unit for unit in reversed(units) if unit.spec.trainable]
        gradients = {unit: Gradients(unit.parameters) for unit in trained}
        self._sharded = sharding.plan.stage.shards_parameters
        self.residence = Residence(sharding, gradients)
        self.backward = BackwardSchedule(sharding, gradients, self.residence)
        self._units = list(units)
        self._left = LeftForward(sharding.collectives)
        self._around: dict[nn.Module, tuple[Callable[..., None], Callable[..., None]]] = {}
        self._running: dict[nn.Module, list[ModuleCall]] = {}
        self._uncalled: dict[Unit, set[nn.Module]] = {}
        self._ways = Ways(self.backward.open_call, self.backward.input_node_runs)
        self._handles: list[RemovableHandle] = []
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = {unit: {modules[name] for name in unit.spec.modules} for unit in units}
        self._register(model)

    def remove(self) -> None:
        """Remove the hooks. The model must not be used through this schedule afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ways.remove()
        self.backward.gradients.clear()
        self.backward.released = True

    def reset(self) -> None:
        """Forget an interrupted forward or backward, and reshard all units."""
        self.backward.reset()
        self._running.clear()
        self._uncalled.clear()
        self.residence.reset()

    def _begin_forward(self) -> None:
        """Forget a forward that raised. Graphs of other forwards are kept. All ranks gather their units again."""
        if self._left.is_lost():
            self._running.clear()
            self._uncalled.clear()
        if self._left.begin() and not self.in_call:
            self.residence.leave_pass()

    def parameters_changed(self) -> None:
        """Note that a program had access to the parameters themselves."""
        for gradients in self.backward.gradients.values():
            gradients.renew()

    def is_in_graph_since(self, number: int) -> bool:
        """Whether parameters are in a graph and any graph was made since node ``number``, on this rank."""
        graphs = (gradients.are_in_a_graph() for gradients in self.backward.gradients.values())
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
        for unit in self.backward.order:
            self._capture(unit)

    def _capture(self, unit: Unit) -> None:
        for position, parameter in enumerate(unit.parameters):
            hook = self.backward.capture(unit, position)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def train(self, unit: Unit) -> None:
        """``unit``, one of the frozen ones, trains from now on. No forward and no backward runs."""
        self.backward.train(unit)
        self._capture(unit)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The model and the modules that units are made of."""
        return self._around.keys()

    @property
    def in_call(self) -> bool:
        """Whether a forward is under way."""
        return any(self._running.values())

    @contextmanager
    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[list[Any]]:
        """Context that counts as a call of ``module``, one of ``modules``. Its user puts the output into the list."""
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
        tables = [unit.whole for unit in units if isinstance(unit.whole, TableParameters)]

        @unseen
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current_task() is not None:  # recomputation: the call is open, or will be
                self.backward.current()
                self.residence.make_whole(units)
                return
            for unit in units:
                unit.optimized.check_seen()
            for table in tables:
                table.check_call(args)
            if self._sharded:
                refuse_mutation(module)
            if is_root:
                self._left.number()
                if self._sharded:
                    self._begin_forward()
                self.residence.begin_pass("forward")
            self.residence.make_whole(units)
            if self._sharded and torch.is_grad_enabled():
                self._ways.watch_input(args, kwargs)
                self._ways.watch_hooked(module, inner, self._running)
            running = [call for calls in self._running.values() for call in calls]
            self._running.setdefault(module, []).append(ModuleCall(units, running))
            for unit in units:
                self._uncalled.setdefault(unit, set(self._modules[unit]))

        return hook

    def _post_forward(
        self, units: Sequence[Unit], attributes: Attributes, *, is_root: bool
    ) -> Callable[..., None]:
        @unseen
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
        ) -> None:
            calls = self._running.get(module)
            if current_task() is not None or not calls:
                return  # recomputation (the unit stays whole until its backward is through), or reset
            call = calls.pop()
            if torch.is_grad_enabled() and (self._sharded or is_root):
                results = (output, args, kwargs, attributes.values())
                if not self._is_watched(call, results) and self._sharded:
                    self.residence.kept.for_backward(units, call)
                    if sys.exc_info()[1] is None:  # else it is the call's end that left no results
                        self.residence.kept.tell(units)
            if self._sharded:
                self.residence.lend(units, output)
            for unit in units:
                uncalled = self._uncalled.get(unit, set())
                uncalled.discard(module)
                if not uncalled and not calls:
                    self._uncalled.pop(unit, None)
                    self.residence.give_back(unit)
            if is_root and not calls:
                for unit in self._uncalled:  # some of their modules were not called this time
                    self.residence.give_back(unit)
                self._uncalled.clear()
                self.residence.end_pass()
                if self._sharded:
                    self._left.end()
            if self._sharded and not self.in_call:
                self.residence.calls_are_through()

        return hook

    def _is_watched(self, call: ModuleCall, results: tuple[Any, ...]) -> bool:
        """Watch the ways into ``call``.

        Returns whether there are no others (calls/ways.py: [Note: The ways into a call]).
        """
        try:
            if self._ways.watch_results(call, results):
                return True
        except TooMany:
            return False
        trainable = (unit for unit in call.units if unit.spec.trainable)
        return not any(self.backward.gradients[unit].are_in_a_graph() for unit in trainable)
