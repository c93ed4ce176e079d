"""Passing: what goes from stage to stage, as the graph of a stage begins and ends with it.

Owns: where the gradient of what came in is left, and memory that stays as it is until it is sent. Must not know:
messages, the order of actions.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Arrived:
    """An activation of the stage before. Nothing here is collective.

    A leaf that requires a gradient could not be changed in place, as blocks of the whole model may do (``x += ...``).
    What the stage gets is therefore the output of a node that keeps the gradient.

    Attributes:
        values: for the stage.
        gradient: of the loss in it; None before the backward, or where nothing depends on it.
    """

    def __init__(self, x: Tensor) -> None:
        """``x``: of any shape and floating dtype."""
        self.gradient: Tensor | None = None
        anchor = torch.empty(
            0, requires_grad=torch.is_grad_enabled(), dtype=torch.float32, device="cpu"
        )
        self.values: Tensor = _Arrive.apply(x, anchor, self)  # type: ignore[no-untyped-call]


class _Arrive(torch.autograd.Function):
    """(x, anchor, arrived) -> x, whose gradient is left in ``arrived``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, arrived: Arrived) -> Tensor:
        """The memory of ``x``."""
        ctx.arrived = weakref.ref(arrived)  # which has the output, and so this node
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Keep it."""
        arrived = ctx.arrived()
        if arrived is not None:
            arrived.gradient = gradient
        return None, None, None


def of_mean(values: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
    """``values``, of which tensors that need a gradient get that of the mean over ``parts`` micro-batches."""
    if not torch.is_grad_enabled():
        return values
    return tuple(
        _OfMean.apply(each, parts) if isinstance(each, Tensor) and each.requires_grad else each  # type: ignore[no-untyped-call]
        for each in values
    )


class _OfMean(torch.autograd.Function):
    """(x, parts) -> x, whose gradient is divided by ``parts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        """The memory of ``x``."""
        ctx.parts = parts
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Of the loss of one micro-batch, to be one of ``parts``."""
        return gradient / ctx.parts, None


def to_send(y: Tensor) -> Tensor:
    """The values of ``y``, an activation or its gradient, in memory of their own, until they are sent.

    That of ``y`` may be a parameter's, or a block or a hook has kept it and changes it in its next micro-batch, while
    the values are on their way: a running mean that began as a detached output, for example.
    """
    return y.detach().clone(memory_format=torch.contiguous_format)
