# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Ways to change, clip and look at gradients between backward and step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import Habits, Training, the_wrapper, wrap

habits = Habits()


def changing(change: Callable[[Training], None]) -> Callable[[Training], None]:
    """A backward, and then a change of gradients."""

    @wraps(change)
    def backward(training: Training) -> None:
        training.loss().backward()
        change(training)

    return backward


def on_each(change: Callable[[Tensor], object]) -> Callable[[Training], None]:
    """A change of each gradient that there is."""

    @wraps(change)
    def change_all(training: Training) -> None:
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return changing(change_all)


@habits.backward(
    "grad-assigned",
    refused="lies in shards over the ranks",
    remark="`p.grad.mul_(0.5)`, or `p.register_hook`",
)
@changing
def assign_scaled(training: Training) -> None:
    """`p.grad = p.grad * 0.5`."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


@habits.backward(
    "grad-noise",
    refused="lies in shards over the ranks",
    remark="`p.register_hook`: noise on each rank's own gradient",
)
@on_each
def add_noise(gradient: Tensor) -> None:
    """Noise added to `p.grad`."""
    generator = torch.Generator().manual_seed(gradient.numel())
    gradient.add_(0.1 * torch.randn(gradient.shape, generator=generator))


@habits.backward(
    "grad-centralised",
    refused="lies in shards over the ranks",
    remark="`p.register_hook`: it is linear, so the mean of ranks is the same",
)
@on_each
def centralise(gradient: Tensor) -> None:
    """The mean over `dim=1` taken out of `p.grad`."""
    if gradient.dim() > 1:
        gradient.add_(-gradient.mean(dim=1, keepdim=True))


def all_parameters(training: Training) -> Any:
    return training.model.parameters()


def clip_norm(
    name: str,
    says: str,
    of: Callable[[Training], Any] = all_parameters,
    max_norm: float = 0.3,
    *,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    def change(training: Training) -> None:
        norm = nn.utils.clip_grad_norm_(of(training), max_norm, **options or {})
        training.note(norm)

    habits.add(name, says, backward=changing(change), **more)


def trainable(training: Training) -> list[Tensor]:
    return [p for p in training.model.parameters() if p.requires_grad]


clip_norm("clip-grad-norm", "`torch.nn.utils.clip_grad_norm_(model.parameters(), c)`")
clip_norm("clip-grad-norm-inf", "the same with `norm_type=inf`", options={"norm_type": math.inf})
clip_norm("clip-grad-norm-1", "the same with `norm_type=1`", options={"norm_type": 1.0})
clip_norm(
    "clip-grad-norm-foreach",
    "the same with `error_if_nonfinite=True, foreach=True`",
    options={"error_if_nonfinite": True, "foreach": True},
)
clip_norm("clip-grad-norm-list", "the same on a list of the trainable parameters", trainable)
clip_norm(
    "clip-grad-norm-wrapper",
    "the same on the parameters of a module around the model",
    lambda training: training.kept["wrapper"].parameters(),
    after=wrap,
    subject=the_wrapper,
)
clip_norm(
    "clip-grad-norm-part",
    "the same on some of the parameters",
    lambda training: training.model.blocks.parameters(),
    0.1,
)


@habits.backward(
    "clip-grad-norm-groups",
    refused="every rank would get another result",
    ranks=(2,),  # of three, one owns nothing here and sees no norm
    remark="on `model.parameters()`",
)
@changing
def clip_in_groups(training: Training) -> None:
    """The same on `optimizer.param_groups`."""
    for group in training.optimizer.param_groups:
        training.note(nn.utils.clip_grad_norm_(group["params"], 0.3))


@habits.backward("clip-grad-value")
@changing
def clip_value(training: Training) -> None:
    """`torch.nn.utils.clip_grad_value_(model.parameters(), c)`."""
    nn.utils.clip_grad_value_(training.model.parameters(), 0.05)


@habits.backward("clip-total-norm")
@changing
def clip_by_total_norm(training: Training) -> None:
    """`get_total_norm` and `clip_grads_with_norm_`."""
    parameters = list(training.model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)
    training.note(norm)


@habits.backward("clip-by-hand")
@changing
def clip_by_own_hand(training: Training) -> None:
    """A norm over all `p.grad` and `torch._foreach_mul_`."""
    grads = [p.grad for p in training.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    torch._foreach_mul_(grads, float(torch.clamp(0.3 / (norm + 1e-6), max=1.0)))
    training.note(norm)


@habits.backward("log-grad-norms")
@changing
def log_norms(training: Training) -> None:
    """`p.grad.norm()` of every parameter, logged."""
    for parameter in training.model.parameters():
        training.note(0.0 if parameter.grad is None else parameter.grad.norm())


habits.add("grad-mul", "`p.grad.mul_(0.5)`", backward=on_each(lambda g: g.mul_(0.5)))
habits.add("grad-data-mul", "`p.grad.data.mul_(0.5)`", backward=on_each(lambda g: g.data.mul_(0.5)))
habits.add(
    "grad-clamped",
    "`torch.clamp_(p.grad, -c, c)`",
    backward=on_each(lambda g: torch.clamp_(g, -0.05, 0.05)),
)
