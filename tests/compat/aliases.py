# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment, has-type"
"""Memory that is known under two names, and buffers that come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, WIDTH, Habits, Net, Residual

habits = Habits()


@habits.block("tied-by-data", refused="lie in the same memory", remark="`b.weight = a.weight`")
class TiedByData(Residual):
    """Two parameters on one memory (`a.weight.data = b.weight.data`)."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH + 1)
        self.again.weight.data = self.inner.weight.data

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(self.again(x)))


@habits.block("kept-transpose", refused="is a view of parameter", remark="take the view in forward")
class KeptTranspose(Residual):
    """`self.t = self.weight.t()`, made once, used in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = self.inner.weight.t()

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(x @ self.transposed))


@habits.block("kept-data", refused="is a view of parameter", remark="use the weight itself")
class KeptData(Residual):
    """`self.w = self.weight.data`, used in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.keep(self.inner.weight)

    def keep(self, weight: Tensor) -> None:
        self.still = weight.data

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) + 0.5 * x @ self.still.t()))


@habits.block("buffer-of-weight", refused="is a view of parameter", remark="use the weight itself")
class BufferOfWeight(KeptData):
    """A buffer on a weight's memory."""

    def keep(self, weight: Tensor) -> None:
        self.register_buffer("still", weight.detach())


@habits.block(
    "overlapping-pieces",
    refused="lie in the same memory",
    remark="take the pieces of one parameter in forward",
)
class Overlapping(Residual):
    """Parameters that are pieces of one tensor and share rows of it."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.upper, self.lower = nn.Parameter(whole[: WIDTH + 1]), nn.Parameter(whole[WIDTH - 1 :])

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.upper[:WIDTH]) @ self.lower[:WIDTH]


@habits.block("pieces")
class Pieces(Residual):
    """Parameters that are pieces of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.upper, self.lower = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[WIDTH:])

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.upper) @ self.lower


@habits.block("not-contiguous")
class Transposed(Residual):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH + 2, WIDTH).t() * 0.3)

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)[:, :WIDTH]


class OwnParameter(nn.Parameter):
    """A class of the user's."""

    def doubled(self) -> Tensor:
        return self * 2.0


@habits.block("parameter-subclass")
class OwnParameters(Residual):
    """A subclass of `nn.Parameter` with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = OwnParameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.matrix.no_decay = True

    def branch(self, x: Tensor) -> Tensor:
        assert self.matrix.no_decay
        return torch.tanh(x @ self.matrix.doubled())


@habits.block("buffer-reassigned")
class Reassigned(Residual):
    """A buffer that forward replaces (`self.mean = 0.9 * self.mean + ...`)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


@habits.block("buffer-late")
class LateBuffer(Residual):
    """A buffer that the first forward registers."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0.5, 1.0, WIDTH), persistent=False)
        return super().forward(x) * self.table


@habits.block("tensor-attribute")
class PlainTensorState(Residual):
    """Tensors on attributes that are no buffers.

    A table that is no buffer, only an attribute, and a count beside it that every forward changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor = torch.linspace(0.5, 1.0, WIDTH)
        self.calls: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls = self.calls + 1.0
        return super().forward(x * self.table) * torch.sigmoid(self.calls.clamp(max=1.0))


class CachedWeight(Residual):
    """A product of weights, made in the first forward of a step and used in its others."""

    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.outer.weight @ self.inner.weight
        return x + torch.tanh(x @ self.cache.t())


@habits.model("cached-weight", block=CachedWeight)
class TwiceWithCache(Net):
    """A product of weights kept from one call of a block to the next."""

    def through(self, x: Any) -> Any:
        for block in self.blocks:
            block.cache = None
        return super().through(super().through(x))


@habits.model(
    "parent-reads", remark="call the block, or make the model the unit (`rule=`)", **SHARDED
)
class ParentReads(Net):
    """The model reads a block's weight through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.blocks[0].inner.weight.data.abs().mean()
        return super().forward(x * scale)


@habits.model(
    "parent-uses",
    stages=(0, 1, 2, 3),
    remark="make the model the unit (`rule=`)",
    **SHARDED,
)
class ParentMultiplies(Net):
    """The model uses a block's weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.blocks[2].inner.weight.t())[:, :WIDTH])


@habits.block("delegating-getattr")
class Delegates(nn.Module):
    """A block whose `__getattr__` delegates.

    Attributes of the wrapped block show through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = Residual()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


@habits.block("own-call")
class OwnCall(Residual):
    """A block with its own `__call__`."""

    def __call__(self, x: Tensor, *more: Any) -> Any:
        return super().__call__(x * 0.9, *more)


habits.add(
    "blocks-by-forward",
    "the model calls `block.forward(x)`",
    call=lambda block, x: block.forward(x),
    remark="`block(x)`",
    **SHARDED,
)
