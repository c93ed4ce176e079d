# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment, has-type"
"""Memory that is known under two names, and buffers that come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, WIDTH, Construct, Net, Residual, net


class TiedByData(Residual):
    """Two parameters on one memory, as weights were tied in old code."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH + 1)
        self.again.weight.data = self.inner.weight.data

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(self.again(x)))


class KeptTranspose(Residual):
    """A view of the weight, made once and used in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = self.inner.weight.t()

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(x @ self.transposed))


class KeptData(Residual):
    """The weight's data under another name, used without a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keep(self.inner.weight)

    def keep(self, weight: Tensor) -> None:
        self.still = weight.data

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) + 0.5 * x @ self.still.t()))


class BufferOfWeight(KeptData):
    """A buffer that is the weight's memory."""

    def keep(self, weight: Tensor) -> None:
        self.register_buffer("still", weight.detach())


class Overlapping(Residual):
    """Parameters that are pieces of one tensor, and share rows."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.upper, self.lower = nn.Parameter(whole[: WIDTH + 1]), nn.Parameter(whole[WIDTH - 1 :])

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.upper[:WIDTH]) @ self.lower[:WIDTH]


class Pieces(Residual):
    """Parameters that are pieces of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.upper, self.lower = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[WIDTH:])

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.upper) @ self.lower


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


class OwnParameters(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = OwnParameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.matrix.no_decay = True

    def branch(self, x: Tensor) -> Tensor:
        assert self.matrix.no_decay
        return torch.tanh(x @ self.matrix.doubled())


class Reassigned(Residual):
    """A running mean that forward replaces instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class LateBuffer(Residual):
    """A table that the first forward registers."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0.5, 1.0, WIDTH), persistent=False)
        return super().forward(x) * self.table


class PlainTensorState(Residual):
    """A table that is no buffer, only an attribute, and a count beside it that every forward changes."""

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


class TwiceWithCache(Net):
    def through(self, x: Any) -> Any:
        for block in self.blocks:
            block.cache = None
        return super().through(super().through(x))


class ParentReads(Net):
    """The model reads a block's weight itself, through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.blocks[0].inner.weight.data.abs().mean()
        return super().forward(x * scale)


class ParentMultiplies(Net):
    """The model uses a block's weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.blocks[2].inner.weight.t())[:, :WIDTH])


class Delegates(nn.Module):
    """Attributes of the wrapped block show through."""

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


class OwnCall(Residual):
    """`__call__` overridden."""

    def __call__(self, x: Tensor, *more: Any) -> Any:
        return super().__call__(x * 0.9, *more)


CONSTRUCTS = [
    Construct(
        "tied-by-data",
        "two parameters on one memory (`a.weight.data = b.weight.data`)",
        net(TiedByData),
        refused="lie in the same memory",
        remark="`b.weight = a.weight`",
    ),
    Construct(
        "overlapping-pieces",
        "parameters that are pieces of one tensor and share rows of it",
        net(Overlapping),
        refused="lie in the same memory",
        remark="take the pieces of one parameter in forward",
    ),
    Construct(
        "kept-transpose",
        "`self.t = self.weight.t()`, made once, used in every forward",
        net(KeptTranspose),
        refused="is a view of parameter",
        remark="take the view in forward",
    ),
    Construct(
        "kept-data",
        "`self.w = self.weight.data`, used in forward",
        net(KeptData),
        refused="is a view of parameter",
        remark="use the weight itself",
    ),
    Construct(
        "buffer-of-weight",
        "a buffer on a weight's memory",
        net(BufferOfWeight),
        refused="is a view of parameter",
        remark="use the weight itself",
    ),
    Construct("pieces", "parameters that are pieces of one tensor", net(Pieces)),
    Construct("not-contiguous", "a parameter that is not contiguous", net(Transposed)),
    Construct(
        "parameter-subclass", "a subclass of `nn.Parameter` with attributes", net(OwnParameters)
    ),
    Construct(
        "buffer-reassigned",
        "a buffer that forward replaces (`self.mean = 0.9 * self.mean + ...`)",
        net(Reassigned),
    ),
    Construct("buffer-late", "a buffer that the first forward registers", net(LateBuffer)),
    Construct(
        "tensor-attribute", "tensors on attributes that are no buffers", net(PlainTensorState)
    ),
    Construct(
        "cached-weight",
        "a product of weights kept from one call of a block to the next",
        net(CachedWeight, TwiceWithCache),
    ),
    Construct(
        "parent-reads",
        "the model reads a block's weight through `.data`",
        net(kind=ParentReads),
        **SHARDED,
        remark="call the block, or make the model the unit (`rule=`)",
    ),
    Construct(
        "parent-uses",
        "the model uses a block's weight itself",
        net(kind=ParentMultiplies),
        **SHARDED,
        remark="make the model the unit (`rule=`)",
    ),
    Construct(
        "blocks-by-forward",
        "the model calls `block.forward(x)`",
        net(call=lambda block, x: block.forward(x)),
        **SHARDED,
        remark="`block(x)`",
    ),
    Construct("delegating-getattr", "a block whose `__getattr__` delegates", net(Delegates)),
    Construct("own-call", "a block with its own `__call__`", net(OwnCall)),
]
