# mypy: disable-error-code="attr-defined, override, assignment, call-overload, index, misc, operator, type-arg"
"""Blocks and models whose results are in no tuple, list or dict."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from tests.compat.construct import SHARDED, WIDTH, Habits, Net, Residual

habits = Habits()


@dataclass
class State:
    """Not registered with pytree."""

    h: Tensor
    count: int = 0


@dataclass(frozen=True)
class FrozenState:
    h: Tensor
    inner: Any


class Slotted:
    __slots__ = ("count", "h")

    def __init__(self, h: Tensor) -> None:
        self.h, self.count = h, 1


class Plain:
    """An object as anybody writes it."""

    def __init__(self, h: Tensor) -> None:
        self.results = {"deep": [SimpleNamespace(h=h)]}

    @property
    def h(self) -> Tensor:
        h: Tensor = self.results["deep"][0].h
        return h


class Output(OrderedDict):
    """Items that are attributes too, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Bag(dict):
    """A dict subclass whose tensor is an attribute."""

    def __init__(self, h: Tensor) -> None:
        super().__init__(kind="bag")
        self.h = h


class Sequence(list):
    @property
    def h(self) -> Tensor:
        return self[0]


class Mapping(UserDict):
    @property
    def h(self) -> Tensor:
        return self["h"]


NamedState = namedtuple("NamedState", "h count")


def wraps(wrap: Callable[[Tensor], Any]) -> type[Residual]:
    """A block whose output is ``wrap(tensor)``; its input is what the block before has returned."""

    class Wraps(Residual):
        def forward(self, x: Any) -> Any:
            return wrap(super().forward(x if isinstance(x, Tensor) else x.h))

    return Wraps


def h_of(x: Any) -> Tensor:
    h: Tensor = x.h
    return h


@habits.model("shared-block-object", block=wraps(Plain), read=h_of)
class OneBlockThrice(Net):
    """One block called three times, returning an object."""

    def through(self, x: Any) -> Any:
        for block in [self.blocks[0]] * 3 + [*self.blocks[1:]]:
            x = block(x)
        return x


class KeepsLoss(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        self.auxiliary = y.square().mean()
        return x + y


@habits.model("loss-on-block-attribute", block=KeepsLoss)
class SumsKeptLosses(Net):
    """A block leaves an auxiliary loss on an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * sum(block.auxiliary for block in self.blocks)


class OutputOnAttribute(Residual):
    def forward(self, x: Tensor) -> None:
        self.output = super().forward(x)


@habits.call("output-on-attribute", block=OutputOnAttribute)
def its_output(block: Any, x: Tensor) -> Tensor:
    """A block returns nothing and leaves its output on an attribute."""
    block(x)
    y: Tensor = block.output
    return y


class KeepsModelLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> None:
        self.loss = F.mse_loss(super().forward(x), y)


@habits.loss("loss-on-model-attribute", model=KeepsModelLoss)
def loss_on_attribute(model: nn.Module, batch: Any) -> Tensor:
    """The model returns nothing and leaves its loss on an attribute."""
    assert model(*batch) is None
    loss: Tensor = model.loss
    return loss


class WritesBoard(Residual):
    def forward(self, board: Any) -> None:
        board.h = super().forward(board.h)


@habits.model("writes-object", block=WritesBoard)
class Blackboard(Net):
    """A block returns nothing and writes its result to an object."""

    def through(self, x: Any) -> Any:
        board = SimpleNamespace(h=x)
        for block in self.blocks:
            block(board)
        return board.h


@habits.block(
    "generator-output",
    call=lambda block, x: torch.cat(list(block(x))),
    remark="return a list",
    **SHARDED,
)
class Generates(Residual):
    """A block is a generator: its body runs while the caller iterates."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(2):
            yield part + self.branch(part)


@habits.block("closure-output", call=lambda block, x: block(x)())
class Postpones(Residual):
    """A block returns a function that holds its result."""

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        y = self.branch(x)
        return lambda: x + y


@habits.block("distribution-block", call=lambda block, x: block(x).rsample())
class Gaussian(Residual):
    """A block returns a `torch.distributions.Normal`."""

    def forward(self, x: Tensor) -> Normal:
        y = self.branch(x)
        return Normal(x + y, F.softplus(y) + 0.1, validate_args=False)


class DistributionModel(Net):
    def forward(self, x: Tensor) -> Normal:
        y = super().forward(x)
        return Normal(y, F.softplus(y) + 0.1, validate_args=False)


@habits.loss("distribution-model", model=DistributionModel)
def likelihood(model: nn.Module, batch: Any) -> Tensor:
    """The model returns a distribution."""
    return -model(batch[0]).log_prob(batch[1]).mean()


class Marked(Tensor):
    """A tensor subclass."""


@habits.block("tensor-subclass-output")
class Marks(Residual):
    """A block returns a tensor subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Marked)


@habits.block("module-output", read=h_of)
class ReturnsItself(Residual):
    """A block returns itself."""

    def forward(self, x: Any) -> Any:
        self.h = super().forward(x if isinstance(x, Tensor) else x.h)
        return self


class ViewOut(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, 2, WIDTH)[:, :, :].transpose(0, 1)


@habits.call("view-output", block=ViewOut)
def flattened(block: Any, x: Tensor) -> Tensor:
    """A block returns a view, which the caller changes in place."""
    y = block(x)
    y *= 0.9  # a view, changed in place by the caller
    return y.reshape(4, WIDTH)


@habits.block("returns-input", call=lambda block, x: sum(block(x)))
class ReturnsInput(Residual):
    """A block returns its input beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.branch(x)


class Nested(Residual):
    def forward(self, x: Any) -> Any:
        x = x["out"][0]["h"] if isinstance(x, dict) else x
        return {"out": [{"h": super().forward(x)}, None, 3], "name": "nested"}


class ReturnsNested(Net):
    def forward(self, x: Tensor) -> Any:
        return {"predictions": (super().forward(x),)}


@habits.loss("nested-output", block=Nested, model=ReturnsNested, read=lambda x: x["out"][0]["h"])
def of_nested(model: nn.Module, batch: Any) -> Tensor:
    """Tensors nested in dicts and lists among other things."""
    return F.mse_loss(model(batch[0])["predictions"][0], batch[1])


@habits.block("unused-output", call=lambda block, x: block(x)[0])
class UnusedOutput(Residual):
    """One of two outputs goes unused."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.inner(x).sum()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WIDTH + 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, rows: int) -> dict[str, Tensor]:
        return {"rows": self.rows[:rows], "scale": self.scale.expand(rows, -1)}


@habits.model("parameter-views", block=Table)
class ReadsTables(Net):
    """A block returns views of its own parameters, and is called again."""

    def through(self, x: Any) -> Any:
        for block in self.blocks:
            table = block(len(x))
            x = torch.tanh(x * table["scale"] + table["rows"])
        return x * self.blocks[0](1)["rows"]


def in_wrapper(name: str, says: str, wrap: Callable[[Tensor], Any]) -> None:
    habits.add(name, f"a block returns {says}", block=wraps(wrap), read=h_of)


in_wrapper("dataclass-output", "a dataclass that pytree does not know", State)
in_wrapper(
    "frozen-dataclass-output",
    "a frozen dataclass inside another",
    lambda h: FrozenState(h, FrozenState(h * 2, None)),
)
in_wrapper("slots-output", "an object with `__slots__`", Slotted)
in_wrapper("object-output", "an object that holds dicts, lists and objects", Plain)
in_wrapper("ordered-dict-output", "an OrderedDict subclass with attributes", lambda h: Output(h=h))
in_wrapper("dict-subclass-output", "a dict subclass whose tensor is an attribute", Bag)
in_wrapper("list-subclass-output", "a list subclass", lambda h: Sequence([h]))
in_wrapper("userdict-output", "a `UserDict`", lambda h: Mapping(h=h))
in_wrapper("namedtuple-output", "a namedtuple", lambda h: NamedState(h, 1))
in_wrapper("namespace-output", "a `SimpleNamespace`", lambda h: SimpleNamespace(h=h))
