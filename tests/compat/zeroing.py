# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Ways to forget gradients, and to ask whether there are any."""

from __future__ import annotations

from collections.abc import Callable

from tests.compat.construct import Training, nothing, of_net, the_wrapper, wrap

Zero = Callable[[Training], None]


def zeroing(zero: Zero, *, at_end: bool = True) -> Callable[[Training], None]:
    """A step that zeroes so before backward and, every other time, after the step."""

    def step(training: Training) -> None:
        zero(training)
        training.loss().backward()
        training.optimizer.step()
        if at_end and training.step % 2:
            zero(training)

    return step


def by_hand(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = None


def by_hand_in_groups(training: Training) -> None:
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def in_place(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def detached_in_place(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def by_children(training: Training) -> None:
    for child in training.model.children():
        child.zero_grad()


def by_modules_to_zero(training: Training) -> None:
    for module in training.model.modules():
        module.zero_grad(set_to_none=False)


def by_wrapper(training: Training) -> None:
    training.kept["wrapper"].zero_grad()


def one_block_only(training: Training) -> None:
    """The other blocks accumulate over all steps."""
    training.model.blocks[1].zero_grad()


def head_by_hand_only(training: Training) -> None:
    training.model.head.weight.grad = None


def to_zero(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def zero_between_forward_and_backward(training: Training) -> None:
    loss = training.loss()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def read_before_backward(training: Training) -> None:
    assert all(p.grad is None for p in training.model.parameters())
    training.loss().backward()
    training.note(sum(p.grad is not None for p in training.model.parameters()))


def step_without_gradient(training: Training) -> None:
    training.optimizer.step()  # plain torch skips what has no gradient
    training.loss().backward()


CONSTRUCTS = [
    of_net("grad-none-by-hand", "`p.grad = None` over `model.parameters()`", zeroing(by_hand)),
    of_net(
        "grad-none-in-groups",
        "`p.grad = None` over `optimizer.param_groups`",
        zeroing(by_hand_in_groups),
    ),
    of_net("grad-zero-in-place", "`p.grad.zero_()` over `model.parameters()`", zeroing(in_place)),
    of_net("grad-detach-zero", "`p.grad.detach_(); p.grad.zero_()`", zeroing(detached_in_place)),
    of_net("children-zero-grad", "`child.zero_grad()` of each child", zeroing(by_children)),
    of_net(
        "modules-zero-grad",
        "`module.zero_grad(set_to_none=False)` of each module",
        zeroing(by_modules_to_zero),
    ),
    of_net(
        "wrapper-zero-grad",
        "`wrapper.zero_grad()` of a module around the model",
        zeroing(by_wrapper),
        after=wrap,
        subject=the_wrapper,
    ),
    of_net(
        "one-block-zero-grad",
        "`model.blocks[1].zero_grad()`; the rest accumulates",
        zeroing(one_block_only, at_end=False),
    ),
    of_net(
        "one-parameter-none",
        "`model.head.weight.grad = None`; the rest accumulates",
        zeroing(head_by_hand_only, at_end=False),
    ),
    of_net(
        "zero-to-zero",
        "`optimizer.zero_grad(set_to_none=False)`",
        zeroing(to_zero, at_end=False),
    ),
    of_net("never-zeroed", "gradients never zeroed", zeroing(nothing)),
    of_net(
        "zero-after-forward",
        "`zero_grad()` between forward and backward",
        zero_between_forward_and_backward,
    ),
    of_net(
        "grad-is-none",
        "asking `p.grad is None` before and after backward",
        backward=read_before_backward,
    ),
    of_net(
        "step-without-gradient",
        "`optimizer.step()` before any backward",
        backward=step_without_gradient,
    ),
]
