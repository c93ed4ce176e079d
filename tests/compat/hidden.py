# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment, misc"
"""Results and uses of parameters that go by ways no argument, output or attribute shows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import WIDTH, Habits, Net, Residual, Training, plain_step

habits = Habits()

BOARD: list[Tensor] = []  # of the program: no module holds it


def with_board(model: nn.Module, batch: Any) -> Tensor:
    BOARD.clear()
    loss = F.mse_loss(model(batch[0]), batch[1]) + torch.stack(BOARD).sum()
    BOARD.clear()
    return loss


@habits.block("posts-branch", loss=with_board)
class PostsBranch(Residual):
    """A second branch of a block, appended to a list of the program's."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        BOARD.append(torch.tanh(self.inner(x) * 0.5).square().mean())
        return y


@habits.block("posts-first", loss=with_board)
class PostsFirst(Residual):
    """The same, made before the block's own output."""

    def forward(self, x: Tensor) -> Tensor:
        BOARD.append(torch.tanh(self.inner(x) * 0.5).square().mean())
        return super().forward(x)


@habits.block("posts-penalty", loss=with_board)
class PostsPenalty(Residual):
    """A penalty on its own weights, appended to a list of the program's."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        BOARD.append(self.inner.weight.square().sum() * 0.1)
        return y


class PostsAll(Residual):
    """Nothing is returned."""

    def forward(self, x: Tensor) -> None:
        BOARD.append(super().forward(x))


@habits.call("posts-all", block=PostsAll)
def taken_from_board(block: Any, x: Tensor) -> Tensor:
    """A block's only output, appended to a list of the program's."""
    block(x)
    return BOARD.pop()


class CallsBack(Residual):
    def forward(self, x: Tensor, give: Callable[[Tensor], None]) -> None:
        give(super().forward(x))


@habits.model("calls-back", block=CallsBack)
class TakesCalls(Net):
    """A block gives its output to a callback."""

    def through(self, x: Any) -> Any:
        found = [x]
        for block in self.blocks:
            block(found[-1], found.append)
        return found[-1]


@habits.block("partial-output", call=lambda block, x: block(x)())
class ReturnsPartial(Residual):
    """A block returns a `functools.partial`."""

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(torch.add, x, self.branch(x))


@habits.block("future-output", call=lambda block, x: block(x).wait())
class ReturnsFuture(Residual):
    """A block returns a `torch.futures.Future`."""

    def forward(self, x: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(super().forward(x))
        return future


LOCAL: ContextVar[Any] = ContextVar("local")


class SetsContext(Residual):
    def forward(self, x: Tensor) -> None:
        LOCAL.set(super().forward(x))


@habits.call("context-variable", block=SetsContext)
def from_context(block: Any, x: Tensor) -> Any:
    """A block sets a `ContextVar`."""
    block(x)
    return LOCAL.get()


class ManyOutputs(Residual):
    """As many small tensors as a detector has boxes."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        y = super().forward(x)
        return [
            {"row": row, "element": element} for row in y for element in row for _ in range(100)
        ]


@habits.call("many-outputs", block=ManyOutputs)
def elements_of(block: Any, x: Tensor) -> Tensor:
    """A block returns 2,400 dicts of tensors."""
    return torch.stack([each["element"] for each in block(x)][::100]).view(4, WIDTH)


@habits.model("block-in-thread")
class InThread(Net):
    """A block runs in a thread.

    One of the blocks runs in a thread of the program's.
    """

    def call(self, block: Any, x: Any) -> Any:
        if block is not self.blocks[1]:
            return block(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(block, x).result()


@habits.model("forward-in-thread")
class AllInThread(Net):
    """The forward runs in a thread, backward in another."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().forward, x).result()


@habits.step("step-in-thread")
def step_in_thread(training: Training) -> None:
    """The whole step runs in a thread."""
    thread = threading.Thread(target=plain_step, args=(training,))
    thread.start()
    thread.join()


@habits.backward("backward-in-thread")
def backward_in_thread(training: Training) -> None:
    """Backward runs in a thread."""
    thread = threading.Thread(target=training.loss().backward)
    thread.start()
    thread.join()


@habits.block("equilibrium")
class Equilibrium(nn.Module):
    """A deep equilibrium: `autograd.grad` inside a backward hook.

    A fixed point, differentiated at the fixed point: autograd.grad inside a backward hook.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.layer(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.f(z, x)
        z = self.f(z, x)
        if not z.requires_grad:
            return z
        z0 = z.detach().requires_grad_()
        f0 = self.f(z0, x.detach())

        def solve(gradient: Tensor) -> Tensor:
            g = gradient
            for _ in range(5):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + gradient
            return g

        z.register_hook(solve)
        return z


class Reverses(torch.autograd.Function):
    """Forward without a graph; backward makes one of its own and runs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block.branch(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.block.branch(x)
            found = torch.autograd.grad(y, (x, *ctx.parameters), gradients[0])
        return found[0], None, *found[1:]


@habits.block("reversible")
class Reversible(Residual):
    """An adjoint: a function that runs its own backward in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + Reverses.apply(x, self, *self.parameters())


@habits.step(
    "old-graph",
    by_torch=True,
    refused="modified by an inplace operation",
    remark="torch says so too",
)
def old_graph(training: Training) -> None:
    """Backward through a graph from before the step.

    Backward through a forward from before the step; torch refuses it: weights were changed.
    """
    training.optimizer.zero_grad()
    first, second = training.loss(0), training.loss(1)
    first.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    second.backward()
    training.optimizer.step()
