"""What surrounds a call of a zeroified model: autocast, transforms of ``torch.func``, forward-mode derivatives.

Owns: hooks that look around before a module runs, ahead of all other hooks. Must not know: units, ranks.

``torch.autocast`` keeps the casts of weights until its outermost block ends, with the graph they came from. In a block
around several steps the next forward would use the weights of before the step, and its gradients would arrive through
the earlier forward. Every forward of the model, and the step, therefore forget them. If no graph needs them, every
module with hooks does, so that the casts of a model never lie in memory together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.zero.calls.untraced import untraced


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
        """Look around before a call of ``module``.

        Raises:
            StepError: as ``refuse_transforms``; or ``torch.jit.trace`` records the call.
        """
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
    """Refuse derivatives that would bypass the hooks that gather, capture and reduce.

    Raises:
        StepError: the message says which calls work instead.
    """
    if torch._C._are_functorch_transforms_active():
        kinds = {str(level.key()).rpartition(".")[2] for level in _transforms()}
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
    """Refuse a mode in which autograd keeps saved tensors by their memory: that of sharded parameters is given back.

    Raises:
        StepError: the message says what to do.
    """
    if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled and torch.is_grad_enabled():
        raise StepError(
            f"{type(module).__name__} was called inside torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
            "needs the memory of parameters that a model at stage 3 gives back between uses. Leave it out and change "
            "a clone of the saved tensor, or train at stage 2"
        )


def _transforms() -> list[Any]:
    stack = torch._C._functorch.get_interpreter_stack()
    return list(stack or ())
