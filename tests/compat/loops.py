# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Training loops: accumulation, several losses, closures, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.compat.construct import Training, of_net, plain_step


def loss_that_needs_none(training: Training) -> None:
    """An evaluation before the step, under no_grad."""
    with torch.no_grad():
        training.model.eval()
        training.loss()
        training.model.train()
    training.loss().backward()


def accumulate(training: Training) -> None:
    for micro in range(3):
        (training.loss(micro) / 3).backward()


def retained_twice(training: Training) -> None:
    loss = training.loss()
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def two_losses_two_backwards(training: Training) -> None:
    first, second = training.loss(0), training.loss(1)
    first.backward()
    second.backward()


def two_losses_one_backward(training: Training) -> None:
    torch.autograd.backward([training.loss(0), training.loss(1)])


def with_closure(training: Training) -> None:
    def closure() -> float:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss.item()

    training.optimizer.step(closure)


def sharpness_aware(training: Training) -> None:
    """SAM: up along the gradient, a second gradient there, back, and down."""
    parameters = list(training.model.parameters())
    training.optimizer.zero_grad()
    training.loss().backward()
    with torch.no_grad():
        moves = {p: 0.05 * p.grad for p in parameters if p.grad is not None}
        for parameter, move in moves.items():
            parameter.add_(move)
    training.optimizer.zero_grad()
    training.loss().backward()
    with torch.no_grad():
        for parameter, move in moves.items():
            parameter.sub_(move)
    training.optimizer.step()


def second_optimizer(training: Training) -> None:
    training.kept["second"] = torch.optim.SGD(training.model.parameters(), lr=0.1)


def step_second(training: Training) -> None:
    training.kept["second"].zero_grad()
    training.loss().backward()
    training.kept["second"].step()


def scaled_by_disabled_scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.optimizer.zero_grad()
    scaler.scale(training.loss()).backward()
    scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)
    scaler.update()


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Biases without decay, another learning rate for the head."""
    head = {id(p) for p in model.head.parameters()}
    rest = [p for p in model.parameters() if id(p) not in head]
    return torch.optim.SGD(
        [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.dim() == 1], "lr": 0.2},
            {"params": model.head.parameters(), "lr": 0.05},
        ],
        lr=0.1,
        momentum=0.9,
    )


def scheduled(make: Callable[[Any], Any], *, by_loss: bool = False) -> dict[str, Any]:
    """``after`` and ``step`` of a construct with a scheduler."""

    def after(training: Training) -> None:
        training.kept["scheduler"] = make(training.optimizer)

    def step(training: Training) -> None:
        plain_step(training)
        training.kept["scheduler"].step(*([1.0] if by_loss else []))
        training.note(training.optimizer.param_groups[0]["lr"])

    return {"after": after, "step": step}


schedulers = torch.optim.lr_scheduler
CONSTRUCTS = [
    of_net(
        "evaluate-between",
        "an evaluation under `no_grad` before each step",
        backward=loss_that_needs_none,
    ),
    of_net("accumulation", "three backward calls, one step", backward=accumulate),
    of_net("retain-graph", "two backward calls on one graph", backward=retained_twice),
    of_net(
        "two-losses", "two forwards, then two backward calls", backward=two_losses_two_backwards
    ),
    of_net(
        "two-losses-together",
        "`torch.autograd.backward([a, b])`",
        backward=two_losses_one_backward,
    ),
    of_net(
        "closure",
        "`optimizer.step(closure)`",
        with_closure,
        refused="optimizer.step(closure) would run backward inside the step",
        remark="backward, then `optimizer.step()`",
    ),
    of_net(
        "sharpness-aware",
        "SAM: parameters moved along `p.grad` and back",
        sharpness_aware,
        refused="lies in shards over the ranks",
    ),
    of_net(
        "second-optimizer",
        "a second optimizer, made after zeroify, takes the step",
        step_second,
        after=second_optimizer,
        refused="is not the one that zeroify was given",
        remark="one optimizer, made before zeroify",
    ),
    of_net("disabled-scaler", "`GradScaler(enabled=False)` around all", scaled_by_disabled_scaler),
    of_net("parameter-groups", "groups with their own options", optimizer=groups),
    of_net(
        "one-cycle",
        "`OneCycleLR`",
        **scheduled(lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=4)),
    ),
    of_net(
        "plateau",
        "`ReduceLROnPlateau` fed with equal losses",
        **scheduled(lambda o: schedulers.ReduceLROnPlateau(o, patience=0), by_loss=True),
    ),
    of_net(
        "cosine-with-warmup",
        "`SequentialLR` of a warm-up and a cosine",
        **scheduled(
            lambda o: schedulers.SequentialLR(
                o,
                [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 5)],
                [2],
            )
        ),
    ),
    of_net(
        "lambda-lr",
        "`LambdaLR`",
        **scheduled(lambda o: schedulers.LambdaLR(o, lambda step: 0.7**step)),
    ),
]
