# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Models and optimizers that change after zeroify, and optimizers of all kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.compat.construct import (
    CHANGED,
    NEW_MEMORY,
    WIDTH,
    Habits,
    Net,
    Residual,
    Training,
    in_blocks,
    plain_step,
)
from tests.helpers.small_models import seeded

habits = Habits()
optim = torch.optim


def of_trainable(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def freeze_stem(model: Any) -> None:
    model.stem.requires_grad_(False)


@habits.after("freeze-after")
def freezes(training: Training) -> None:
    """`requires_grad_(False)` after zeroify."""
    training.model.stem.requires_grad_(False)


@habits.step("freeze-and-thaw")
def freezes_and_thaws(training: Training) -> None:
    """`requires_grad_(False)` and back between steps.

    GAN code: off for the other's turn, on again.
    """
    training.model.requires_grad_(False)
    training.model.requires_grad_(True)
    plain_step(training)


@habits.step(
    "thaw-later", change=freeze_stem, optimizer=lambda m: optim.SGD(m.parameters(), lr=0.1)
)
def thaws(training: Training) -> None:
    """A part unfrozen after some steps."""
    if training.step == 1:
        training.model.stem.requires_grad_(True)
    plain_step(training)


@habits.step(
    "thaw-into-a-group",
    change=freeze_stem,
    optimizer=lambda m: of_trainable(optim.AdamW, m, lr=0.01),
)
def thaws_into_a_group(training: Training) -> None:
    """A part unfrozen after some steps, in a group that is added then."""
    if training.step == 1:
        stem = training.model.stem.requires_grad_(True)
        training.optimizer.add_param_group({"params": list(stem.parameters()), "lr": 0.003})
    plain_step(training)


@habits.after("add-group", refused="put in after zeroify", remark="in the model before zeroify")
def adds_group(training: Training) -> None:
    """`optimizer.add_param_group` with a parameter that the model does not have."""
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@habits.after("add-module", refused="came into the model after zeroify", remark="before zeroify")
def adds_module(training: Training) -> None:
    """A module added after zeroify."""
    training.model.extra = nn.Linear(WIDTH, WIDTH)


@habits.after("replace-head", refused="came into the model after zeroify", remark="before zeroify")
def replaces_head(training: Training) -> None:
    """A module replaced after zeroify."""
    training.model.head = seeded(lambda: nn.Linear(WIDTH, 3))


@habits.after("initialize-after", **CHANGED)
def initializes(training: Training) -> None:
    """Parameters initialized anew after zeroify."""
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


@habits.after("load-after", **CHANGED)
def loads(training: Training) -> None:
    """`load_state_dict` after zeroify."""
    training.model.load_state_dict(seeded(Net, 9).state_dict())


@habits.after(
    "load-assign-after",
    refused="came into the model after zeroify",
    remark="inside `gathered(model, modifier_rank=0)`, without `assign`",
)
def loads_assigning(training: Training) -> None:
    """`load_state_dict(assign=True)` after zeroify."""
    training.model.load_state_dict(seeded(Net, 9).state_dict(), assign=True)


@habits.after("load-gathered")
def loads_whole(training: Training) -> None:
    """`load_state_dict` inside `gathered(modifier_rank=0)`."""
    with training.whole(training.model, change=True):
        training.model.load_state_dict(seeded(Net, 9).state_dict())


@habits.after("set-data", **NEW_MEMORY)
def sets_data(training: Training) -> None:
    """`parameter.data = ...` after zeroify."""
    for parameter in training.model.parameters():
        parameter.data = parameter.data * 0.5


@habits.step("change-in-place", **CHANGED)
def changes_in_place(training: Training) -> None:
    """Parameters changed in place between steps."""
    plain_step(training)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.9)


@habits.step("change-data", stages=(0, 1, 2, 3), **CHANGED)
def changes_data_in_place(training: Training) -> None:
    """`parameter.data.mul_(...)` between steps.

    Weight decay of one's own, as old code has it; `.data` tells autograd nothing.
    """
    plain_step(training)
    for parameter in training.model.parameters():
        parameter.data.mul_(0.9)


@habits.step("to-vector", **NEW_MEMORY)
def to_vector(training: Training) -> None:
    """`parameters_to_vector` and back."""
    plain_step(training)
    vector = nn.utils.parameters_to_vector(training.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, training.model.parameters())


@habits.after("remove-block")
def removes_block(training: Training) -> None:
    """A block removed after zeroify."""
    del training.model.blocks[2]


@habits.after("reorder-blocks")
def reorders_blocks(training: Training) -> None:
    """Blocks in another order after zeroify."""
    blocks: Any = training.model.blocks
    training.model.blocks = nn.ModuleList(blocks[i] for i in (2, 1, 0))


@habits.change("pruned")
@in_blocks
def pruned(block: Any) -> None:
    """`prune.l1_unstructured` before zeroify."""
    prune.l1_unstructured(block.inner, "weight", amount=0.3)


@habits.step("optimizer-round-trip", remark="each rank's own shards")
def round_trip(training: Training) -> None:
    """`optimizer.load_state_dict(optimizer.state_dict())`."""
    plain_step(training)
    training.optimizer.load_state_dict(training.optimizer.state_dict())


@habits.step("rate-by-hand")
def changes_rate(training: Training) -> None:
    """`group['lr'] *= 0.7`."""
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.7
    plain_step(training)


@habits.step("two-steps")
def steps_twice(training: Training) -> None:
    """`optimizer.step()` twice on one gradient."""
    plain_step(training)
    training.optimizer.step()


@habits.after("patched-forward")
def patches_forward(training: Training) -> None:
    """`block.forward` replaced after zeroify."""
    for block in training.model.blocks:
        old = block.forward
        block.forward = lambda x, old=old: old(x) * 0.9


@habits.after("swapped-class")
def swaps_class(training: Training) -> None:
    """`block.__class__` replaced after zeroify."""

    class Louder(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.1

    for block in training.model.blocks:
        block.__class__ = Louder


class OwnSGD(torch.optim.SGD):
    """A subclass that only adds a method."""

    def rate(self) -> Any:
        return self.param_groups[0]["lr"]


class NormalizedSGD(torch.optim.SGD):
    """A subclass whose step is no longer elementwise: each gradient is divided by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1e-6
        super().step()


class SignOptimizer(torch.optim.Optimizer):
    """An own optimizer, elementwise; it says so."""

    hpczero_elementwise = True

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.sign(parameter.grad) * -group["lr"])


class SilentSignOptimizer(SignOptimizer):
    """The same, which does not say so."""

    hpczero_elementwise = False


LR = {"lr": 0.01}
SMOOTH = {"lr": 0.01, "eps": 1e-3}


def of_optimizer(name: str, kind: Any, options: dict[str, Any], **more: Any) -> None:
    said = ", ".join(f"{key}={value}" for key, value in options.items())

    build = partial(of_trainable, kind, **options)
    habits.add(name, f"`{kind.__name__}({said})`", optimizer=build, **more)


of_optimizer("adam", optim.Adam, {**SMOOTH, "amsgrad": True})
of_optimizer("adamw-foreach", optim.AdamW, {**SMOOTH, "foreach": True})
of_optimizer("adamw-fused", optim.AdamW, {**SMOOTH, "fused": True})
NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
of_optimizer("sgd-nesterov", optim.SGD, NESTEROV)
of_optimizer("rmsprop", optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-3})
of_optimizer("adagrad", optim.Adagrad, {"lr": 0.05, "eps": 1e-3})
HISTORY = "couples the elements of all parameters through a history of inner products"
of_optimizer("lbfgs", optim.LBFGS, {"lr": 0.1}, refused=HISTORY)
of_optimizer("adafactor", optim.Adafactor, {"lr": 0.1})
of_optimizer("own-subclass", OwnSGD, {"lr": 0.1})
of_optimizer("own-step", NormalizedSGD, {"lr": 0.1}, refused="hpczero_elementwise")
of_optimizer("own-optimizer", SignOptimizer, LR)
of_optimizer(
    "own-optimizer-silent",
    SilentSignOptimizer,
    LR,
    refused="is not known to be elementwise",
    remark="`hpczero_elementwise = True` if it is",
)
