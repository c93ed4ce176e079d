"""Casts at the model's boundary.

Owns: inputs to the parameter dtype, outputs to fp32, and the loss scale's entry into backward. Must not know: units,
MPI.

Users call ``loss.backward()`` as always: the gradient that enters the model is multiplied by the loss scale at the
model's outputs, in fp32, before it becomes fp16, so nothing outside the model is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class Casting:
    """Hooks on the root module; none in fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, scale: Callable[[], float]) -> None:
        """Args: dtype, of parameters and activations; scale, the current loss scale."""
        self._dtype = dtype
        self._scale = scale
        self._scaled_task: int | None = None
        self._handles: list[RemovableHandle] = []
        if dtype is not torch.float32:
            self._handles = [
                model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True),
                model.register_forward_hook(self._cast_outputs),
            ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(self._dtype) if floating else leaf

        return pytree.tree_map(cast, (args, kwargs))

    def _cast_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        def cast(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                return leaf
            return _ScaledOutput.apply(leaf, self._enter_backward)  # type: ignore[no-untyped-call]

        return pytree.tree_map(cast, output)

    def _enter_backward(self) -> float:
        self._scaled_task = torch._C._current_graph_task_id()
        return self._scale()

    @property
    def scaled(self) -> bool:
        """Whether the backward that runs came in through the model's outputs, and so carries the loss scale."""
        return self._scaled_task == torch._C._current_graph_task_id()


class _ScaledOutput(torch.autograd.Function):
    """To fp32; the gradient comes back scaled, in the tensor's own dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.dtype, ctx.scale = tensor.dtype, scale
        # An output that the loss does not use gets no gradient.
        ctx.set_materialize_grads(False)
        return tensor.float() if tensor.dtype is not torch.float32 else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        return None if gradient is None else (gradient * ctx.scale()).to(ctx.dtype), None
