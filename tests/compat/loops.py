# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Training loops: accumulation, several losses, closures, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.compat.construct import Habits, Training, plain_step

habits = Habits()


@habits.backward("evaluate-between")
def loss_that_needs_none(training: Training) -> None:
    """An evaluation under `no_grad` before each step."""
    with torch.no_grad():
        training.model.eval()
        training.loss()
        training.model.train()
    training.loss().backward()


@habits.backward("accumulation")
def accumulate(training: Training) -> None:
    """Three backward calls, one step."""
    for micro in range(3):
        (training.loss(micro) / 3).backward()


@habits.backward("retain-graph")
def retained_twice(training: Training) -> None:
    """Two backward calls on one graph."""
    loss = training.loss()
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


@habits.backward("two-losses")
def two_losses_two_backwards(training: Training) -> None:
    """Two forwards, then two backward calls."""
    first, second = training.loss(0), training.loss(1)
    first.backward()
    second.backward()


@habits.backward("two-losses-together")
def two_losses_one_backward(training: Training) -> None:
    """`torch.autograd.backward([a, b])`."""
    torch.autograd.backward([training.loss(0), training.loss(1)])


@habits.step(
    "closure",
    refused="optimizer.step(closure) would run backward inside the step",
    remark="backward, then `optimizer.step()`",
)
def with_closure(training: Training) -> None:
    """`optimizer.step(closure)`."""

    def closure() -> float:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss.item()

    training.optimizer.step(closure)


@habits.step("sharpness-aware", refused="lies in shards over the ranks")
def sharpness_aware(training: Training) -> None:
    """SAM: parameters moved along `p.grad` and back.

    SAM: up along the gradient, a second gradient there, back, and down.
    """
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


@habits.step(
    "second-optimizer",
    after=second_optimizer,
    refused="is not the one that zeroify was given",
    remark="one optimizer, made before zeroify",
)
def step_second(training: Training) -> None:
    """A second optimizer, made after zeroify, takes the step."""
    training.kept["second"].zero_grad()
    training.loss().backward()
    training.kept["second"].step()


@habits.step("disabled-scaler")
def scaled_by_disabled_scaler(training: Training) -> None:
    """`GradScaler(enabled=False)` around all."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.optimizer.zero_grad()
    scaler.scale(training.loss()).backward()
    scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)
    scaler.update()


@habits.optimizer("parameter-groups")
def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with their own options.

    Biases without decay, another learning rate for the head.
    """
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


def scheduled(name: str, says: str, make: Callable[[Any], Any], *measure: float) -> None:
    def after(training: Training) -> None:
        training.kept["scheduler"] = make(training.optimizer)

    def step(training: Training) -> None:
        plain_step(training)
        training.kept["scheduler"].step(*measure)
        training.note(training.optimizer.param_groups[0]["lr"])

    habits.add(name, says, after=after, step=step)


def warmed_up(optimizer: Any) -> Any:
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(
        optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 5)], [2]
    )


schedulers = torch.optim.lr_scheduler
scheduled("one-cycle", "`OneCycleLR`", lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=4))
scheduled(
    "plateau",
    "`ReduceLROnPlateau` fed with equal losses",
    lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    1.0,
)
scheduled("cosine-with-warmup", "`SequentialLR` of a warm-up and a cosine", warmed_up)
scheduled("lambda-lr", "`LambdaLR`", lambda o: schedulers.LambdaLR(o, lambda step: 0.7**step))
