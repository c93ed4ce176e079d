# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Ways to change, clip and look at gradients between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import Training, of_net, the_wrapper, wrap


def changing(change: Callable[[Training], None]) -> Callable[[Training], None]:
    """A backward, and then a change of gradients."""

    def backward(training: Training) -> None:
        training.loss().backward()
        change(training)

    return backward


def on_each(change: Callable[[Tensor], object]) -> Callable[[Training], None]:
    """A change of each gradient that there is."""

    def change_all(training: Training) -> None:
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return changing(change_all)


def assign_scaled(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def add_noise(gradient: Tensor) -> None:
    generator = torch.Generator().manual_seed(gradient.numel())
    gradient.add_(0.1 * torch.randn(gradient.shape, generator=generator))


def centralise(gradient: Tensor) -> None:
    """Gradient centralisation: the mean over inputs taken out."""
    if gradient.dim() > 1:
        gradient.add_(-gradient.mean(dim=1, keepdim=True))


def clip_norm(
    of: Callable[[Training], Any] = lambda training: training.model.parameters(),
    max_norm: float = 0.3,
    **options: Any,
) -> Callable[[Training], None]:
    def change(training: Training) -> None:
        training.note(nn.utils.clip_grad_norm_(of(training), max_norm, **options))

    return changing(change)


def clip_in_groups(training: Training) -> None:
    for group in training.optimizer.param_groups:
        training.note(nn.utils.clip_grad_norm_(group["params"], 0.3))


def trainable(training: Training) -> list[Tensor]:
    return [p for p in training.model.parameters() if p.requires_grad]


def clip_value(training: Training) -> None:
    nn.utils.clip_grad_value_(training.model.parameters(), 0.05)


def clip_by_total_norm(training: Training) -> None:
    parameters = list(training.model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)
    training.note(norm)


def clip_by_own_hand(training: Training) -> None:
    grads = [p.grad for p in training.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    torch._foreach_mul_(grads, float(torch.clamp(0.3 / (norm + 1e-6), max=1.0)))
    training.note(norm)


def log_norms(training: Training) -> None:
    for parameter in training.model.parameters():
        training.note(0.0 if parameter.grad is None else parameter.grad.norm())


CONSTRUCTS = [
    of_net("grad-mul", "`p.grad.mul_(0.5)`", backward=on_each(lambda g: g.mul_(0.5))),
    of_net(
        "grad-data-mul", "`p.grad.data.mul_(0.5)`", backward=on_each(lambda g: g.data.mul_(0.5))
    ),
    of_net(
        "grad-assigned",
        "`p.grad = p.grad * 0.5`",
        backward=changing(assign_scaled),
        refused="lies in shards over the ranks",
        remark="`p.grad.mul_(0.5)`, or `p.register_hook`",
    ),
    of_net(
        "grad-noise",
        "noise added to `p.grad`",
        backward=on_each(add_noise),
        refused="lies in shards over the ranks",
        remark="`p.register_hook`: noise on each rank's own gradient",
    ),
    of_net(
        "grad-clamped",
        "`torch.clamp_(p.grad, -c, c)`",
        backward=on_each(lambda g: torch.clamp_(g, -0.05, 0.05)),
    ),
    of_net(
        "grad-centralised",
        "the mean over `dim=1` taken out of `p.grad`",
        backward=on_each(centralise),
        refused="lies in shards over the ranks",
        remark="`p.register_hook`: it is linear, so the mean of ranks is the same",
    ),
    of_net(
        "clip-grad-norm",
        "`torch.nn.utils.clip_grad_norm_(model.parameters(), c)`",
        backward=clip_norm(),
    ),
    of_net(
        "clip-grad-norm-inf",
        "the same with `norm_type=inf`",
        backward=clip_norm(norm_type=float("inf")),
    ),
    of_net("clip-grad-norm-1", "the same with `norm_type=1`", backward=clip_norm(norm_type=1.0)),
    of_net(
        "clip-grad-norm-foreach",
        "the same with `error_if_nonfinite=True, foreach=True`",
        backward=clip_norm(error_if_nonfinite=True, foreach=True),
    ),
    of_net(
        "clip-grad-norm-list",
        "the same on a list of the trainable parameters",
        backward=clip_norm(trainable),
    ),
    of_net(
        "clip-grad-norm-wrapper",
        "the same on the parameters of a module around the model",
        backward=clip_norm(lambda training: training.kept["wrapper"].parameters()),
        after=wrap,
        subject=the_wrapper,
    ),
    of_net(
        "clip-grad-norm-groups",
        "the same on `optimizer.param_groups`",
        backward=changing(clip_in_groups),
        refused="every rank would get another result",
        ranks=(2,),  # of three, one owns nothing here and sees no norm
        remark="on `model.parameters()`",
    ),
    of_net(
        "clip-grad-norm-part",
        "the same on some of the parameters",
        backward=clip_norm(lambda training: training.model.blocks.parameters(), 0.1),
    ),
    of_net(
        "clip-grad-value",
        "`torch.nn.utils.clip_grad_value_(model.parameters(), c)`",
        backward=changing(clip_value),
    ),
    of_net(
        "clip-total-norm",
        "`get_total_norm` and `clip_grads_with_norm_`",
        backward=changing(clip_by_total_norm),
    ),
    of_net(
        "clip-by-hand",
        "a norm over all `p.grad` and `torch._foreach_mul_`",
        backward=changing(clip_by_own_hand),
    ),
    of_net(
        "log-grad-norms",
        "`p.grad.norm()` of every parameter, logged",
        backward=changing(log_norms),
    ),
]
