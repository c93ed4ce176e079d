# mypy: disable-error-code="union-attr, operator, index, assignment"
"""Ways to forget gradients, and to ask whether there are any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

from tests.compat.construct import Habits, Training, nothing, the_wrapper, wrap

habits = Habits()

Zero = Callable[[Training], None]


def zeroing(zero: Zero, *, at_end: bool = True) -> Callable[[Training], None]:
    """A step that zeroes so before backward and, every other time, after the step."""

    @wraps(zero)
    def step(training: Training) -> None:
        zero(training)
        training.loss().backward()
        training.optimizer.step()
        if at_end and training.step % 2:
            zero(training)

    return step


zeroing_before = partial(zeroing, at_end=False)


@habits.step("grad-none-by-hand")
@zeroing
def by_hand(training: Training) -> None:
    """`p.grad = None` over `model.parameters()`."""
    for parameter in training.model.parameters():
        parameter.grad = None


@habits.step("grad-none-in-groups")
@zeroing
def by_hand_in_groups(training: Training) -> None:
    """`p.grad = None` over `optimizer.param_groups`."""
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@habits.step("grad-zero-in-place")
@zeroing
def in_place(training: Training) -> None:
    """`p.grad.zero_()` over `model.parameters()`."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@habits.step("grad-detach-zero")
@zeroing
def detached_in_place(training: Training) -> None:
    """`p.grad.detach_(); p.grad.zero_()`."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


@habits.step("children-zero-grad")
@zeroing
def by_children(training: Training) -> None:
    """`child.zero_grad()` of each child."""
    for child in training.model.children():
        child.zero_grad()


@habits.step("modules-zero-grad")
@zeroing
def by_modules_to_zero(training: Training) -> None:
    """`module.zero_grad(set_to_none=False)` of each module."""
    for module in training.model.modules():
        module.zero_grad(set_to_none=False)


@habits.step("wrapper-zero-grad", after=wrap, subject=the_wrapper)
@zeroing
def by_wrapper(training: Training) -> None:
    """`wrapper.zero_grad()` of a module around the model."""
    training.kept["wrapper"].zero_grad()


@habits.step("one-block-zero-grad")
@zeroing_before
def one_block_only(training: Training) -> None:
    """`model.blocks[1].zero_grad()`; the rest accumulates."""
    training.model.blocks[1].zero_grad()


@habits.step("one-parameter-none")
@zeroing_before
def head_by_hand_only(training: Training) -> None:
    """`model.head.weight.grad = None`; the rest accumulates."""
    training.model.head.weight.grad = None


@habits.step("zero-to-zero")
@zeroing_before
def to_zero(training: Training) -> None:
    """`optimizer.zero_grad(set_to_none=False)`."""
    training.optimizer.zero_grad(set_to_none=False)


@habits.step("zero-after-forward")
def zero_between_forward_and_backward(training: Training) -> None:
    """`zero_grad()` between forward and backward."""
    loss = training.loss()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


@habits.backward("grad-is-none")
def read_before_backward(training: Training) -> None:
    """Asking `p.grad is None` before and after backward."""
    assert all(p.grad is None for p in training.model.parameters())
    training.loss().backward()
    training.note(sum(p.grad is not None for p in training.model.parameters()))


@habits.backward("step-without-gradient")
def step_without_gradient(training: Training) -> None:
    """`optimizer.step()` before any backward."""
    training.optimizer.step()  # plain torch skips what has no gradient
    training.loss().backward()


habits.add("never-zeroed", "gradients never zeroed", step=zeroing(nothing))
