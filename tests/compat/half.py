# mypy: disable-error-code="override"
"""Half precision: some of the other constructs again, and what its casts and its loss scale could get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat import (
    arguments,
    autograd,
    gradients,
    in_place,
    loops,
    outputs,
    recomputation,
    zeroing,
)
from tests.compat.construct import Construct, Habits, Net, Place, Training, vectors

# Of the largest magnitude: a rounding to bf16 is 4e-3, to fp16 5e-4, and three steps have many of them.
TOLERANCES = {"bf16": 5e-2, "fp16": 1e-2}
AGAIN = {
    each.name: each
    for module in (arguments, autograd, gradients, in_place, loops, outputs, recomputation, zeroing)
    for each in module.habits
}
NAMES = (
    "batch-gains-logits",
    "batch-gains-logits-silently",
    "auxiliary-losses-in-list",
    "in-place-add",
    "identity-of-arguments",
    "loss-on-model-attribute",
    "distribution-model",
    "dataclass-output",
    "shared-block-object",
    "gradient-penalty",
    "saliency",
    "two-heads-two-backwards",
    "retain-graph",
    "accumulation",
    "checkpoint-blocks",
    "wrapper-zero-grad",
    "grad-mul",
    "clip-grad-norm",
    "log-grad-norms",
)


OWN = Habits()


class ChangesInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


@OWN.loss("changes-input", model=ChangesInput)
def reads_input(model: nn.Module, batch: Any) -> Tensor:
    """The model changes its input in place, and the caller reads it."""
    x, y = batch
    return F.mse_loss(model(x) + x[:, :3], y)


class SameContainer(Net):
    def forward(self, batch: dict[str, Tensor], again: dict[str, Tensor]) -> Tensor:
        y = super().forward(batch["x"])
        return y if again is batch else y * 2


@OWN.loss("same-container", model=SameContainer)
def given_twice(model: nn.Module, batch: Any) -> Tensor:
    """One dict given twice: `again is batch`."""
    named = {"x": batch[0]}
    return F.mse_loss(model(named, named), batch[1])


@OWN.backward("input-gradients")
def input_gradients(training: Training) -> None:
    """`torch.autograd.grad` of inputs, logged.

    Gradients of inputs have no loss scale in them.
    """
    x, y = vectors(Place(0, training.step))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(training.model(x), y), x)
    training.note(slope.norm())
    training.loss().backward()


@OWN.batch("inputs-need-gradients")
def with_leaf(place: Place) -> Any:
    """Inputs that need gradients."""
    x, y = vectors(place)
    return x.requires_grad_(place.rank == 0), y


REFUSED = {
    ("changes-input", "bf16"): "the model changed a tensor among its arguments in place",
    ("changes-input", "fp16"): "the model changed a tensor among its arguments in place",
    ("gradient-penalty", "fp16"): "a gradient of gradients",
}


def halved(construct: Construct, precision: str) -> Construct:
    return replace(
        construct,
        refused=REFUSED.get((construct.name, precision), ""),
        name=f"{construct.name}-{precision}",
        says=f"{precision}: {construct.says}",
        precision=precision,
        tolerance=TOLERANCES[precision],
    )


habits = [
    halved(each, precision)
    for precision in TOLERANCES
    for each in [*OWN, *(AGAIN[name] for name in NAMES)]
]
