"""Schedule: when units act.

Owns: the hooks on modules and parameters, the order of reductions, the end of backward. Must not know: buffers, MPI,
optimizers; it only calls verbs of units.

    forward   pre-hook: unshard, wait | module runs | post-hook: reshard
    backward  output node: unshard, wait | module's backward; gradients are captured | input node: reshard, reduce
    end       one callback: whatever has not been reduced (root unit, inputs without gradient, unused modules)

[Note: Order of reductions]
Collectives must be issued in the same order on every rank, whatever autograd does there: a module that one rank did
not use
never becomes ready on it. Reductions therefore go out in one fixed order, the reverse of unit order, each exactly
once in a
backward; a unit that is ready early waits for its turn, and one that never is goes out at the end with zeros.

[Note: Which calls are open]
A call of a module is open from its forward until the backward of its inputs has run, or until its graph is freed. A
unit is
ready when none of its calls is open: this covers modules called twice, two forwards before one backward, and forwards
that never see a backward. The token of a call is held by its graph nodes alone, so freeing the graph closes the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.prefetch import Prefetch
from hpczero.unit import Unit


class Call:
    """One call of a module; lives as long as its graph. See [Note: Which calls are open]."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)


class Schedule:
    """Drives the units of one model. Forward and backward are collective as soon as a unit communicates.

    Attributes:
        sync: whether backward reduces gradients; ``no_sync`` turns it off.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        gradient_factor: Callable[[], float],
        ahead: bool = False,
    ) -> None:
        """Register the hooks.

        Args:
            model: the module whose calls start a forward.
            units: in unit order, the root unit(s) first.
            gradient_factor: what the sum over ranks is multiplied by at each reduction.
            ahead: start to make the next unit whole while one is used.
        """
        self.sync = True
        self._units = list(units)
        self._order = [unit for unit in reversed(self._units) if unit.spec.trainable]
        self._place = {unit: place for place, unit in enumerate(self._order)}
        self._gradient_factor = gradient_factor
        self._prefetch = Prefetch() if ahead else None
        self._open: dict[Unit, weakref.WeakSet[Call]] = {unit: weakref.WeakSet() for unit in units}
        self._running: dict[nn.Module, list[Call]] = {}
        self._uncalled: dict[Unit, set[nn.Module]] = {}
        self._backward: _Backward | None = None
        self._handles: list[RemovableHandle] = []
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = {unit: {modules[name] for name in unit.spec.modules} for unit in units}
        self._register(model)

    def remove(self) -> None:
        """Take the hooks away; the model must not be used through this schedule afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Forget an interrupted forward or backward and give gathered parameters back."""
        self._backward = None
        for unit in self._order:
            unit.finish_reduction()
        self._running.clear()
        self._uncalled.clear()
        for unit in self._units:
            self._open[unit].clear()
            unit.reshard()

    def _register(self, model: nn.Module) -> None:
        users: dict[nn.Module, list[Unit]] = {model: []}
        for unit in self._units:
            for module in sorted(self._modules[unit], key=id):
                users.setdefault(module, []).append(unit)
        for module, units in users.items():
            self._handles += [
                module.register_forward_pre_hook(
                    self._pre_forward(units, is_root=module is model),
                    with_kwargs=True,
                    prepend=True,
                ),
                module.register_forward_hook(
                    self._post_forward(units, is_root=module is model), always_call=True
                ),
            ]
        for unit in self._order:
            for position, parameter in enumerate(unit.parameters):
                hook = self._capture(unit, position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    # --- forward -------------------------------------------------------------------------------------------------

    def _pre_forward(self, units: Sequence[Unit], *, is_root: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            recomputing = _backward_task() is not None
            if recomputing and self._backward is None:
                raise StepError(
                    f"a forward of {type(module).__name__} started inside a backward that did not come through "
                    "the model: reentrant activation checkpointing is not supported; use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            if is_root and not recomputing and self._prefetch is not None:
                self._prefetch.begin("forward")
            self._make_whole(units)
            if recomputing:
                return None
            call = Call(units)
            self._running.setdefault(module, []).append(call)
            for unit in units:
                self._uncalled.setdefault(unit, set(self._modules[unit]))
            if not torch.is_grad_enabled():
                return None
            return self._pass_through(_InputNode, call, (args, kwargs))

        return hook

    def _post_forward(self, units: Sequence[Unit], *, is_root: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            calls = self._running.get(module)
            if _backward_task() is not None or not calls:
                return None  # recomputation (the unit stays whole until its backward is through), or reset
            call = calls.pop()
            for unit in units:
                uncalled = self._uncalled.get(unit, set())
                uncalled.discard(module)
                if not uncalled and not calls:
                    self._uncalled.pop(unit, None)
                    unit.reshard()
            if is_root and not calls:
                for unit in self._uncalled:  # some of their modules were not called this time
                    unit.reshard()
                self._uncalled.clear()
                self._end_pass()
            if output is None or not torch.is_grad_enabled():
                return None
            passed = self._pass_through(_OutputNode, call, output)
            if passed is not None:
                for unit in units:
                    self._open[unit].add(call)
            return passed

        return hook

    def _pass_through(self, node: type[torch.autograd.Function], call: Call, tree: Any) -> Any:
        """``tree`` with every tensor that needs a gradient sent through one node; None if there is none."""
        leaves, spec = pytree.tree_flatten(tree)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        if not places:
            return None
        outputs = node.apply(self, call, *[leaves[i] for i in places])  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, outputs, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, spec)

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
                unit.reshard()

    # --- backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, call: Call) -> None:
        """The outputs of ``call`` have their gradients: make its parameters whole."""
        self._current_backward().calls.add(call)
        for unit in call.units:
            self._open[unit].add(call)
        self._make_whole(call.units)

    def end_call(self, call: Call) -> None:
        """The inputs of ``call`` have their gradients: its parameters are done unless another call is open."""
        backward = self._current_backward()
        for unit in call.units:
            self._open[unit].discard(call)
            if not self._open[unit]:
                unit.reshard()
                backward.ready.add(unit)
        if self.sync:
            while backward.next < len(self._order) and self._order[backward.next] in backward.ready:
                self._reduce_next(backward)

    def _capture(self, unit: Unit, position: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            backward = self._current_backward()
            if self._place[unit] < backward.next:
                raise StepError(
                    f"the gradient of {unit.spec.layout.slots[position].name!r} arrived after its unit "
                    f"{unit.spec.name!r} was reduced: a module outside the unit uses the parameter. Make the "
                    "module that uses it the unit (rule=...), or leave the parameter to the root unit"
                )
            unit.capture(position, accumulating=not self.sync)

        return hook

    def _current_backward(self) -> _Backward:
        """The backward that is running; the first to ask starts it and asks for its end to be called."""
        task = _backward_task()
        assert task is not None, "called from autograd nodes and gradient hooks only"
        if self._backward is not None and self._backward.task != task:
            raise StepError(
                "another backward of this model has not finished. Either it ended in an exception, and its "
                "gradients are lost: call optimizer.zero_grad() before the next backward. Or this one runs inside "
                "it, which reentrant activation checkpointing does: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._backward is None:
            self._backward = _Backward(task)
            if self._prefetch is not None:
                self._prefetch.begin("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _reduce_next(self, backward: _Backward) -> None:
        """See [Note: Order of reductions]."""
        unit = self._order[backward.next]
        backward.next += 1
        unit.reshard()
        unit.reduce_gradients(self._gradient_factor())

    def _end_backward(self) -> None:
        backward = self._backward
        assert backward is not None, "the callback belongs to the backward that queued it"
        for call in backward.calls:
            for unit in call.units:
                self._open[unit].discard(call)
        self._end_pass()
        for unit in self._units:
            unit.reshard()
        if self.sync:
            while backward.next < len(self._order):
                self._reduce_next(backward)
            for unit in self._order:
                unit.finish_reduction()
        self._backward = None

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running, or was interrupted."""
        return self._backward is not None


class _Backward:
    """Progress of one backward pass."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.calls: set[Call] = set()
        self.ready: set[Unit] = set()
        self.next = 0  # place in the order of reductions


def _backward_task() -> int | None:
    """Number of the backward pass this code runs in, None outside."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


class _OutputNode(torch.autograd.Function):
    """Identity on a module's outputs; its backward comes before the module's.

    Returns aliases, not views, so that a following in-place operation works as it does without us.
    """

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule, ctx.call = schedule, call
        # What the loss does not use must get no gradient, not zeros.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.schedule.begin_backward(ctx.call)
        return (None, None, *gradients)


class _InputNode(torch.autograd.Function):
    """Identity on a module's inputs; its backward comes after the module's."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule, ctx.call = schedule, call
        # What the loss does not use must get no gradient, not zeros.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.schedule.end_call(ctx.call)
        return (None, None, *gradients)
