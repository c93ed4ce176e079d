# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Models and optimizers that change after zeroify, and optimizers of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.compat.construct import (
    CHANGED,
    NEW_MEMORY,
    WIDTH,
    Construct,
    Net,
    Residual,
    Training,
    in_blocks,
    net,
    of_net,
    plain_step,
    seeded,
)


def freezes(training: Training) -> None:
    training.model.stem.requires_grad_(False)


def freezes_and_thaws(training: Training) -> None:
    """GAN code: off for the other's turn, on again."""
    training.model.requires_grad_(False)
    training.model.requires_grad_(True)
    plain_step(training)


def thaws(training: Training) -> None:
    if training.step == 1:
        training.model.stem.requires_grad_(True)
    plain_step(training)


def thaws_into_a_group(training: Training) -> None:
    if training.step == 1:
        stem = training.model.stem.requires_grad_(True)
        training.optimizer.add_param_group({"params": list(stem.parameters()), "lr": 0.003})
    plain_step(training)


def adds_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def adds_module(training: Training) -> None:
    training.model.extra = nn.Linear(WIDTH, WIDTH)


def replaces_head(training: Training) -> None:
    training.model.head = seeded(lambda: nn.Linear(WIDTH, 3))


def initializes(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def loads(training: Training) -> None:
    training.model.load_state_dict(seeded(Net, 9).state_dict())


def loads_assigning(training: Training) -> None:
    training.model.load_state_dict(seeded(Net, 9).state_dict(), assign=True)


def loads_whole(training: Training) -> None:
    with training.whole(training.model, change=True):
        training.model.load_state_dict(seeded(Net, 9).state_dict())


def sets_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data * 0.5


def changes_in_place(training: Training) -> None:
    plain_step(training)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.9)


def changes_data_in_place(training: Training) -> None:
    """Weight decay of one's own, as old code has it; `.data` tells autograd nothing."""
    plain_step(training)
    for parameter in training.model.parameters():
        parameter.data.mul_(0.9)


def to_vector(training: Training) -> None:
    plain_step(training)
    vector = nn.utils.parameters_to_vector(training.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, training.model.parameters())


def removes_block(training: Training) -> None:
    del training.model.blocks[2]


def reorders_blocks(training: Training) -> None:
    blocks: Any = training.model.blocks
    training.model.blocks = nn.ModuleList(blocks[i] for i in (2, 1, 0))


def pruned(block: Any) -> None:
    prune.l1_unstructured(block.inner, "weight", amount=0.3)


def round_trip(training: Training) -> None:
    """The optimizer's state out and in again, on each rank its own."""
    plain_step(training)
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def changes_rate(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.7
    plain_step(training)


def steps_twice(training: Training) -> None:
    plain_step(training)
    training.optimizer.step()


def patches_forward(training: Training) -> None:
    """Monkey patching of a block."""
    for block in training.model.blocks:
        old = block.forward
        block.forward = lambda x, old=old: old(x) * 0.9


def swaps_class(training: Training) -> None:
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


def of(kind: Any, **options: Any) -> Any:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


def of_optimizer(name: str, kind: Any, options: dict[str, Any], **more: Any) -> Construct:
    said = ", ".join(f"{key}={value}" for key, value in options.items())
    return of_net(name, f"`{kind.__name__}({said})`", optimizer=of(kind, **options), **more)


optim = torch.optim
CONSTRUCTS = [
    of_net(
        "freeze-after",
        "`requires_grad_(False)` after zeroify",
        after=freezes,
    ),
    of_net("freeze-and-thaw", "`requires_grad_(False)` and back between steps", freezes_and_thaws),
    Construct(
        "thaw-later",
        "a part unfrozen after some steps",
        net(change=lambda model: model.stem.requires_grad_(False)),
        step=thaws,
        optimizer=lambda m: optim.SGD(m.parameters(), lr=0.1),
    ),
    Construct(
        "thaw-into-a-group",
        "a part unfrozen after some steps, in a group that is added then",
        net(change=lambda model: model.stem.requires_grad_(False)),
        step=thaws_into_a_group,
        optimizer=lambda m: optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01),
    ),
    of_net(
        "add-group",
        "`optimizer.add_param_group` with a parameter that the model does not have",
        after=adds_group,
        refused="put in after zeroify",
        remark="in the model before zeroify",
    ),
    of_net(
        "add-module",
        "a module added after zeroify",
        after=adds_module,
        refused="came into the model after zeroify",
        remark="before zeroify",
    ),
    of_net(
        "replace-head",
        "a module replaced after zeroify",
        after=replaces_head,
        refused="came into the model after zeroify",
        remark="before zeroify",
    ),
    of_net(
        "initialize-after",
        "parameters initialized anew after zeroify",
        after=initializes,
        **CHANGED,
    ),
    of_net(
        "load-after",
        "`load_state_dict` after zeroify",
        after=loads,
        **CHANGED,
    ),
    of_net(
        "load-assign-after",
        "`load_state_dict(assign=True)` after zeroify",
        after=loads_assigning,
        refused="came into the model after zeroify",
        remark="inside `gathered(model, modifier_rank=0)`, without `assign`",
    ),
    of_net(
        "load-gathered", "`load_state_dict` inside `gathered(modifier_rank=0)`", after=loads_whole
    ),
    of_net(
        "set-data",
        "`parameter.data = ...` after zeroify",
        after=sets_data,
        **NEW_MEMORY,
    ),
    of_net(
        "change-in-place",
        "parameters changed in place between steps",
        changes_in_place,
        **CHANGED,
    ),
    of_net(
        "change-data",
        "`parameter.data.mul_(...)` between steps",
        changes_data_in_place,
        stages=(0, 1, 2, 3),
        **CHANGED,
    ),
    of_net(
        "to-vector",
        "`parameters_to_vector` and back",
        to_vector,
        **NEW_MEMORY,
    ),
    of_net("remove-block", "a block removed after zeroify", after=removes_block),
    of_net("reorder-blocks", "blocks in another order after zeroify", after=reorders_blocks),
    Construct("pruned", "`prune.l1_unstructured` before zeroify", net(change=in_blocks(pruned))),
    of_net("patched-forward", "`block.forward` replaced after zeroify", after=patches_forward),
    of_net("swapped-class", "`block.__class__` replaced after zeroify", after=swaps_class),
    of_net(
        "optimizer-round-trip",
        "`optimizer.load_state_dict(optimizer.state_dict())`",
        round_trip,
        remark="each rank's own shards",
    ),
    of_net("rate-by-hand", "`group['lr'] *= 0.7`", changes_rate),
    of_net("two-steps", "`optimizer.step()` twice on one gradient", steps_twice),
    of_optimizer("adam", optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    of_optimizer("adamw-foreach", optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    of_optimizer("adamw-fused", optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    of_optimizer(
        "sgd-nesterov",
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    of_optimizer("rmsprop", optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-3}),
    of_optimizer("adagrad", optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    of_optimizer(
        "lbfgs",
        optim.LBFGS,
        {"lr": 0.1},
        refused="couples the elements of all parameters through a history of inner products",
    ),
    of_optimizer("adafactor", optim.Adafactor, {"lr": 0.1}),
    of_optimizer("own-subclass", OwnSGD, {"lr": 0.1}),
    of_optimizer("own-step", NormalizedSGD, {"lr": 0.1}, refused="hpczero_elementwise"),
    of_optimizer("own-optimizer", SignOptimizer, {"lr": 0.01}),
    of_optimizer(
        "own-optimizer-silent",
        SilentSignOptimizer,
        {"lr": 0.01},
        refused="is not known to be elementwise",
        remark="`hpczero_elementwise = True` if it is",
    ),
]
