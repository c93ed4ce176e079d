# mypy: disable-error-code="override, operator, union-attr, index, attr-defined"
"""Hooks of the user's own, set before zeroify and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, Construct, Training, of_net

Hooking = Callable[[Training], None]


def on_blocks(register: Callable[[nn.Module, Training], Any]) -> Hooking:
    def hook(training: Training) -> None:
        for block in training.model.blocks:
            register(block, training)

    return hook


def changes_input(block: nn.Module, training: Training) -> None:
    block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))


def changes_keywords(block: nn.Module, training: Training) -> None:
    block.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 0.1,), kwargs), with_kwargs=True
    )


def changes_output(block: nn.Module, training: Training) -> None:
    block.register_forward_hook(lambda module, args, output: output * 0.9)


def collects_outputs(block: Any, training: Training) -> None:
    """Feature extraction: activations of each block, used in the loss."""
    seen = training.kept.setdefault("seen", [])
    block.register_forward_hook(lambda module, args, output: seen.append(output))


def with_seen(combine: Callable[[Tensor, list[Tensor]], Tensor]) -> Callable[[Training], None]:
    """A backward of the loss and what hooks have seen in its forward."""

    def backward(training: Training) -> None:
        seen = training.kept["seen"]

        def loss(place: Any) -> Tensor:
            seen.clear()
            value = training.construct.loss(training.model, training.construct.batch(place))
            return combine(value, seen)

        training.mean(loss).backward()
        seen.clear()

    return backward


def changes_gradient(block: nn.Module, training: Training) -> None:
    block.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


def changes_gradient_first(block: nn.Module, training: Training) -> None:
    block.register_full_backward_pre_hook(lambda module, after: (after[0] * 0.5,))


def scales_parameters(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def reads_parameters(training: Training) -> None:
    """Whatever a rank sees of its own gradient, it sees."""
    training.kept["seen"] = 0

    def hook(gradient: Tensor) -> None:
        training.kept["seen"] += 1

    for parameter in training.model.parameters():
        parameter.register_hook(hook)


def noting_calls(training: Training) -> None:
    training.loss().backward()
    training.note(training.kept["seen"] > 0)


def after_accumulation(training: Training) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)


def counting_after_accumulation(training: Training) -> None:
    training.kept["seen"] = 0

    def count(parameter: Tensor) -> None:
        training.kept["seen"] += parameter.grad is not None

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(count)


def optimizer_in_backward(training: Training) -> None:
    """Each parameter is updated as soon as its gradient is there, and the gradient forgotten."""
    training.kept["each"] = {p: torch.optim.SGD([p], lr=0.1) for p in training.model.parameters()}

    def step(parameter: Tensor) -> None:
        training.kept["each"][parameter].step()
        training.kept["each"][parameter].zero_grad()

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def only_backward(training: Training) -> None:
    training.loss().backward()


def on_tensor(block: nn.Module, training: Training) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 0.5)

    block.register_forward_hook(hook)


def retains(block: nn.Module, training: Training) -> None:
    seen = training.kept.setdefault("seen", [])

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            seen.append(output)

    block.register_forward_hook(hook)


def reading_retained(training: Training) -> None:
    training.kept["seen"].clear()
    training.loss().backward()
    assert all(output.grad is not None for output in training.kept["seen"])
    training.note(len(training.kept["seen"]) > 0)


def on_optimizer(training: Training) -> None:
    def halve_rate(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    training.optimizer.register_step_post_hook(halve_rate)


def on_everything(training: Training) -> None:
    """A profiler's: each module of the model, leaves too."""
    training.kept["seen"] = 0

    def count(*args: Any) -> None:
        training.kept["seen"] += 1

    for module in training.model.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count)
        module.register_full_backward_hook(count)


def reads_weight_in_hook(block: nn.Module, training: Training) -> None:
    """An orthogonality penalty's hook: it reads the block's weight when its forward is through."""
    norms = training.kept.setdefault("seen", [])
    block.register_forward_hook(
        lambda module, args, output: norms.append(module.inner.weight.square().sum())
    )


def keeps_one_feature(training: Training) -> None:
    collects_outputs(training.model.blocks[1].inner, training)


def keeps_one_block(training: Training) -> None:
    collects_outputs(training.model.blocks[1], training)


def of_what_was_seen(loss: Tensor, seen: list[Tensor]) -> Tensor:
    return seen[0].square().mean()


def both(name: str, says: str, hook: Hooking, **more: Any) -> list[Construct]:
    """The same hook, set before zeroify and after it."""
    changed = more.pop("later", {})
    return [
        of_net(f"{name}-before", f"{says}, set before zeroify", before=hook, **more),
        of_net(f"{name}-after", f"{says}, set after zeroify", after=hook, **(more | changed)),
    ]


CONSTRUCTS = [
    *both("pre-hook", "a forward pre-hook that changes a block's input", on_blocks(changes_input)),
    *both("pre-hook-kwargs", "a forward pre-hook with keywords", on_blocks(changes_keywords)),
    *both(
        "forward-hook", "a forward hook that changes a block's output", on_blocks(changes_output)
    ),
    *both(
        "feature-hook",
        "a forward hook that keeps outputs for the loss",
        on_blocks(collects_outputs),
        backward=with_seen(lambda loss, seen: loss + 0.1 * torch.stack(seen).square().mean()),
    ),
    *both(
        "backward-hook",
        "a full backward hook that scales a block's gradient",
        on_blocks(changes_gradient),
    ),
    *both("backward-pre-hook", "a full backward pre-hook", on_blocks(changes_gradient_first)),
    *both("tensor-hook", "`output.register_hook` in a forward hook", on_blocks(on_tensor)),
    *both(
        "retain-grad",
        "`output.retain_grad()` in a forward hook",
        on_blocks(retains),
        backward=reading_retained,
    ),
    *both("parameter-hook", "`parameter.register_hook` that scales", scales_parameters),
    *both(
        "parameter-hook-reads",
        "`parameter.register_hook` that looks",
        reads_parameters,
        backward=noting_calls,
    ),
    *both(
        "post-accumulate",
        "a post-accumulate hook that scales `p.grad`",
        after_accumulation,
        later={"refused": "is not reduced over ranks yet"},
    ),
    *both(
        "post-accumulate-counts",
        "a post-accumulate hook that looks at `p.grad`",
        counting_after_accumulation,
        backward=noting_calls,
    ),
    *both("hooks-everywhere", "hooks on every module", on_everything, backward=noting_calls),
    *both(
        "weight-in-hook",
        "a forward hook that reads its block's weight for the loss",
        on_blocks(reads_weight_in_hook),
        backward=with_seen(lambda loss, seen: loss + 0.01 * torch.stack(seen).sum()),
        later=SHARDED,
    ),
    *both("optimizer-hook", "`optimizer.register_step_post_hook`", on_optimizer),
    *both(
        "one-block-hook",
        "a forward hook keeps one block's output, and the loss is made of that alone",
        keeps_one_block,
        backward=with_seen(of_what_was_seen),
    ),
    *both(
        "one-feature-hook",
        "a forward hook inside one block keeps the only output that the loss is made of",
        keeps_one_feature,
        backward=with_seen(of_what_was_seen),
    ),
    of_net(
        "optimizer-in-backward",
        "an optimizer per parameter, stepped in a post-accumulate hook",
        only_backward,
        after=optimizer_in_backward,
        refused="is not the one that zeroify was given",
        remark="one optimizer; its state is sharded",
    ),
]
