# mypy: disable-error-code="override, operator, union-attr, index, attr-defined"
"""Hooks of the user's own, set before zeroify and after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, Habits, Training, plain_backward, said

habits = Habits()

Hooking = Callable[[Training], None]
Nothing: dict[str, Any] = {}


def both(name: str, later: dict[str, Any] = Nothing, **more: Any) -> Callable[[Hooking], Hooking]:
    """The hook, set before zeroify and after it, where ``later`` differs."""

    def add(hook: Hooking) -> Hooking:
        habits.add(f"{name}-before", f"{said(hook)}, set before zeroify", before=hook, **more)
        habits.add(f"{name}-after", f"{said(hook)}, set after zeroify", after=hook, **more | later)
        return hook

    return add


def on_blocks(register: Callable[[Any, Training], None]) -> Hooking:
    @wraps(register)
    def hook(training: Training) -> None:
        for block in training.model.blocks:
            register(block, training)

    return hook


def on_parameters(register: Callable[[Any, Training], None]) -> Hooking:
    @wraps(register)
    def hook(training: Training) -> None:
        for parameter in training.model.parameters():
            register(parameter, training)

    return hook


def seen(training: Training) -> list[Any]:
    """What hooks have seen."""
    return training.kept.setdefault("seen", [])


def noting_calls(training: Training) -> None:
    training.loss().backward()
    training.note(any(seen(training)))


def with_seen(combine: Callable[[Tensor, list[Tensor]], Tensor]) -> Callable[[Training], None]:
    """A backward of the loss and what hooks have seen in its forward."""

    def backward(training: Training) -> None:
        def loss(place: Any) -> Tensor:
            seen(training).clear()
            value = training.construct.loss(training.model, training.construct.batch(place))
            return combine(value, seen(training))

        training.mean(loss).backward()
        seen(training).clear()

    return backward


def of_what_was_seen(loss: Tensor, seen: list[Tensor]) -> Tensor:
    return seen[0].square().mean()


# --- on blocks


@both("pre-hook")
@on_blocks
def changes_input(block: nn.Module, training: Training) -> None:
    """A forward pre-hook that changes a block's input."""
    block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))


@both("pre-hook-kwargs")
@on_blocks
def changes_keywords(block: nn.Module, training: Training) -> None:
    """A forward pre-hook with keywords."""
    block.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 0.1,), kwargs), with_kwargs=True
    )


@both("forward-hook")
@on_blocks
def changes_output(block: nn.Module, training: Training) -> None:
    """A forward hook that changes a block's output."""
    block.register_forward_hook(lambda module, args, output: output * 0.9)


def collects_outputs(block: Any, training: Training) -> None:
    """A forward hook that keeps outputs for the loss."""
    kept = seen(training)
    block.register_forward_hook(lambda module, args, output: kept.append(output))


both(
    "feature-hook",
    backward=with_seen(lambda loss, seen: loss + 0.1 * torch.stack(seen).square().mean()),
)(on_blocks(collects_outputs))


@both("backward-hook")
@on_blocks
def changes_gradient(block: nn.Module, training: Training) -> None:
    """A full backward hook that scales a block's gradient."""
    block.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


@both("backward-pre-hook")
@on_blocks
def changes_gradient_first(block: nn.Module, training: Training) -> None:
    """A full backward pre-hook."""
    block.register_full_backward_pre_hook(lambda module, after: (after[0] * 0.5,))


@both("tensor-hook")
@on_blocks
def on_tensor(block: nn.Module, training: Training) -> None:
    """`output.register_hook` in a forward hook."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 0.5)

    block.register_forward_hook(hook)


def reading_retained(training: Training) -> None:
    seen(training).clear()
    training.loss().backward()
    assert all(output.grad is not None for output in seen(training))
    training.note(len(seen(training)) > 0)


@both("retain-grad", backward=reading_retained)
@on_blocks
def retains(block: nn.Module, training: Training) -> None:
    """`output.retain_grad()` in a forward hook."""
    kept = seen(training)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            kept.append(output)

    block.register_forward_hook(hook)


@both("one-block-hook", backward=with_seen(of_what_was_seen))
def keeps_one_block(training: Training) -> None:
    """A forward hook keeps one block's output, and the loss is made of that alone."""
    collects_outputs(training.model.blocks[1], training)


@both("one-feature-hook", backward=with_seen(of_what_was_seen))
def keeps_one_feature(training: Training) -> None:
    """A forward hook inside one block keeps the only output that the loss is made of."""
    collects_outputs(training.model.blocks[1].inner, training)


@both(
    "weight-in-hook",
    later=SHARDED,
    backward=with_seen(lambda loss, seen: loss + 0.01 * torch.stack(seen).sum()),
)
@on_blocks
def reads_weight_in_hook(block: nn.Module, training: Training) -> None:
    """A forward hook that reads its block's weight for the loss.

    An orthogonality penalty's: it reads when the block's forward is through.
    """
    norms = seen(training)
    block.register_forward_hook(
        lambda module, args, output: norms.append(module.inner.weight.square().sum())
    )


@both("hooks-everywhere", backward=noting_calls)
def on_everything(training: Training) -> None:
    """Hooks on every module.

    A profiler's: leaves have them too.
    """

    def count(*args: Any) -> None:
        seen(training).append(True)

    for module in training.model.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count)
        module.register_full_backward_hook(count)


# --- on parameters and optimizers


@both("parameter-hook")
@on_parameters
def scales(parameter: Tensor, training: Training) -> None:
    """`parameter.register_hook` that scales."""
    parameter.register_hook(lambda gradient: gradient * 0.5)


@both("parameter-hook-reads", backward=noting_calls)
@on_parameters
def reads(parameter: Tensor, training: Training) -> None:
    """`parameter.register_hook` that looks."""
    parameter.register_hook(lambda gradient: seen(training).append(True))


@both("post-accumulate", later={"refused": "is not reduced over ranks yet"})
@on_parameters
def scales_accumulated(parameter: Tensor, training: Training) -> None:
    """A post-accumulate hook that scales `p.grad`."""

    def scale(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    parameter.register_post_accumulate_grad_hook(scale)


@both("post-accumulate-counts", backward=noting_calls)
@on_parameters
def counts_accumulated(parameter: Tensor, training: Training) -> None:
    """A post-accumulate hook that looks at `p.grad`."""
    parameter.register_post_accumulate_grad_hook(
        lambda parameter: seen(training).append(parameter.grad is not None)
    )


@habits.after(
    "optimizer-in-backward",
    step=plain_backward,
    refused="is not the one that zeroify was given",
    remark="one optimizer; its state is sharded",
)
@on_parameters
def optimizer_in_backward(parameter: Tensor, training: Training) -> None:
    """An optimizer per parameter, stepped in a post-accumulate hook."""
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


@both("optimizer-hook")
def on_optimizer(training: Training) -> None:
    """`optimizer.register_step_post_hook`."""

    def halve_rate(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    training.optimizer.register_step_post_hook(halve_rate)
