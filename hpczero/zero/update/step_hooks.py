"""StepHooks: where a model's update comes in among the hooks of its optimizer.

Owns: the order of hooks. Must not know: what they do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StepHooks:
    """Hooks on ``optimizer.step``: the last before it, the first after it.

    Hooks of the user's find guarded gradients before a step and new values on all ranks after it, whether they were
    registered before these or later.
    """

    def __init__(
        self, optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        """Register them; not collective."""
        self._optimizer = optimizer
        pre = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        post = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        first = optimizer.register_step_pre_hook(before)
        last = optimizer.register_step_post_hook(after)
        self._handles = [first, last]
        post.move_to_end(last.id, last=False)

        def register_step_pre_hook(hook: Any) -> RemovableHandle:
            handle = Optimizer.register_step_pre_hook(optimizer, hook)
            if first.id in pre:
                pre.move_to_end(first.id)
            return handle

        optimizer.__dict__["register_step_pre_hook"] = register_step_pre_hook

    @property
    def are_last(self) -> bool:
        """Whether no hook follows before torch's step: one registered past the optimizer's own method may."""
        return bool(
            next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._handles[0].id
        )

    def remove(self) -> None:
        """Take them away; not collective."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.__dict__.pop("register_step_pre_hook", None)
