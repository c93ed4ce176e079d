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

from tests.compat.construct import (
    WIDTH,
    Construct,
    Net,
    Residual,
    Training,
    net,
    of_net,
    plain_step,
)

BOARD: list[Tensor] = []  # of the program: no module holds it


class PostsBranch(Residual):
    """A second branch, made last, whose result goes to the program's list beside the block's own output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        BOARD.append(torch.tanh(self.inner(x) * 0.5).square().mean())
        return y


class PostsFirst(Residual):
    def forward(self, x: Tensor) -> Tensor:
        BOARD.append(torch.tanh(self.inner(x) * 0.5).square().mean())
        return super().forward(x)


class PostsPenalty(Residual):
    """A penalty on the block's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        BOARD.append(self.inner.weight.square().sum() * 0.1)
        return y


class PostsAll(Residual):
    """Nothing is returned."""

    def forward(self, x: Tensor) -> None:
        BOARD.append(super().forward(x))


def taken_from_board(block: Any, x: Tensor) -> Tensor:
    block(x)
    return BOARD.pop()


def with_board(model: nn.Module, batch: Any) -> Tensor:
    BOARD.clear()
    loss = F.mse_loss(model(batch[0]), batch[1]) + torch.stack(BOARD).sum()
    BOARD.clear()
    return loss


class CallsBack(Residual):
    def forward(self, x: Tensor, give: Callable[[Tensor], None]) -> None:
        give(super().forward(x))


class TakesCalls(Net):
    def through(self, x: Any) -> Any:
        found = [x]
        for block in self.blocks:
            block(found[-1], found.append)
        return found[-1]


class ReturnsPartial(Residual):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(torch.add, x, self.branch(x))


class ReturnsFuture(Residual):
    def forward(self, x: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(super().forward(x))
        return future


LOCAL: ContextVar[Any] = ContextVar("local")


class SetsContext(Residual):
    def forward(self, x: Tensor) -> None:
        LOCAL.set(super().forward(x))


def from_context(block: Any, x: Tensor) -> Any:
    block(x)
    return LOCAL.get()


class ManyOutputs(Residual):
    """As many small tensors as a detector has boxes."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        y = super().forward(x)
        return [
            {"row": row, "element": element} for row in y for element in row for _ in range(100)
        ]


def elements_of(block: Any, x: Tensor) -> Tensor:
    return torch.stack([each["element"] for each in block(x)][::100]).view(4, WIDTH)


class InThread(Net):
    """One of the blocks runs in a thread of the program's."""

    def call(self, block: Any, x: Any) -> Any:
        if block is not self.blocks[1]:
            return block(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(block, x).result()


class AllInThread(Net):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().forward, x).result()


def step_in_thread(training: Training) -> None:
    """Forward, backward and step on a thread that is not the first."""
    thread = threading.Thread(target=plain_step, args=(training,))
    thread.start()
    thread.join()


def backward_in_thread(training: Training) -> None:
    thread = threading.Thread(target=training.loss().backward)
    thread.start()
    thread.join()


class Equilibrium(nn.Module):
    """A fixed point, differentiated at the fixed point: autograd.grad inside a backward hook."""

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


class Reversible(Residual):
    """The adjoint method: parameters are arguments of an own function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + Reverses.apply(x, self, *self.parameters())


def old_graph(training: Training) -> None:
    """Backward through a forward from before the step; torch refuses it: weights were changed."""
    training.optimizer.zero_grad()
    first, second = training.loss(0), training.loss(1)
    first.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    second.backward()
    training.optimizer.step()


CONSTRUCTS = [
    Construct(
        "posts-branch",
        "a second branch of a block, appended to a list of the program's",
        net(PostsBranch),
        loss=with_board,
    ),
    Construct(
        "posts-first",
        "the same, made before the block's own output",
        net(PostsFirst),
        loss=with_board,
    ),
    Construct(
        "posts-penalty",
        "a penalty on its own weights, appended to a list of the program's",
        net(PostsPenalty),
        loss=with_board,
    ),
    Construct(
        "posts-all",
        "a block's only output, appended to a list of the program's",
        net(PostsAll, call=taken_from_board),
    ),
    Construct("calls-back", "a block gives its output to a callback", net(CallsBack, TakesCalls)),
    Construct(
        "partial-output",
        "a block returns a `functools.partial`",
        net(ReturnsPartial, call=lambda block, x: block(x)()),
    ),
    Construct(
        "future-output",
        "a block returns a `torch.futures.Future`",
        net(ReturnsFuture, call=lambda block, x: block(x).wait()),
    ),
    Construct(
        "context-variable", "a block sets a `ContextVar`", net(SetsContext, call=from_context)
    ),
    Construct(
        "many-outputs", "a block returns 2,400 dicts of tensors", net(ManyOutputs, call=elements_of)
    ),
    Construct("block-in-thread", "a block runs in a thread", net(kind=InThread)),
    Construct(
        "forward-in-thread",
        "the forward runs in a thread, backward in another",
        net(kind=AllInThread),
    ),
    of_net("step-in-thread", "the whole step runs in a thread", step_in_thread),
    of_net("backward-in-thread", "backward runs in a thread", backward=backward_in_thread),
    Construct(
        "equilibrium",
        "a deep equilibrium: `autograd.grad` inside a backward hook",
        net(Equilibrium),
    ),
    Construct(
        "reversible",
        "an adjoint: a function that runs its own backward in backward",
        net(Reversible),
    ),
    of_net(
        "old-graph",
        "backward through a graph from before the step",
        old_graph,
        by_torch=True,
        refused="modified by an inplace operation",
        remark="torch says so too",
    ),
]
