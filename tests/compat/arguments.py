# mypy: disable-error-code="override, union-attr, operator, index, assignment, call-overload, misc, type-arg"
# Code as others write it: most of it has no types.
"""Blocks that change what they are given, or look at its identity."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import Habits, Net, Place, Residual, vectors

habits = Habits()


class Appends(Residual):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        x = super().forward(x)
        found.append(x)
        return x


@habits.model("appends-to-list", block=Appends)
class SumsAList(Net):
    """A block appends to a list it is given."""

    def through(self, x: Any) -> Any:
        found: list[Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        return x + sum(found)


class Down(Residual):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        skips.append(self.branch(x))
        return torch.tanh(x)


class Up(Residual):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return self.branch(x + skips.pop())


@habits.model("unet-skips")
class UNet(Net):
    """U-Net: skips pushed to and popped from one list."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.blocks = nn.ModuleList([Down(), Down(), Up(), Up()])

    def through(self, x: Any) -> Any:
        skips: list[Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        assert not skips, "every skip was used"
        return x


def with_auxiliary(model: nn.Module, batch: Any) -> Tensor:
    output, auxiliary = model(batch[0])
    return F.mse_loss(output, batch[1]) + 0.3 * auxiliary


class AddsAuxiliaryLoss(Residual):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = self.branch(x)
        losses.append(y.square().mean())
        return x + y


@habits.model("auxiliary-losses-in-list", block=AddsAuxiliaryLoss, loss=with_auxiliary)
class AuxiliaryLosses(Net):
    """Auxiliary losses collected in a list argument."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, losses)
        return self.head(x), torch.stack(losses).sum()


class WritesState(Residual):
    def forward(self, state: dict[str, Tensor]) -> None:
        state["previous"] = state["h"]
        state["h"] = super().forward(state["h"]) + 0.1 * state.get("previous", 0)


@habits.model("writes-dict", block=WritesState)
class SharedState(Net):
    """A block returns nothing and writes into a dict argument."""

    def through(self, x: Any) -> Any:
        state = {"h": x}
        for block in self.blocks:
            block(state)
        return state["h"] * state["previous"]


def named(place: Place) -> dict[str, Tensor]:
    x, y = vectors(place)
    return {"x": x, "y": y}


def loss_of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model(batch)
    return F.mse_loss(batch["logits"], batch["y"])


@habits.model("batch-gains-logits", batch=named, loss=loss_of_batch)
class GainsLogits(Net):
    """The model writes `logits` into the batch dict and returns it."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["logits"] = super().forward(batch["x"])
        return batch


@habits.model("batch-gains-logits-silently", batch=named, loss=loss_of_batch)
class GainsLogitsSilently(Net):
    """The model writes `logits` into the batch dict and returns nothing."""

    def forward(self, batch: dict[str, Tensor]) -> None:
        batch["logits"] = super().forward(batch["x"])


@habits.block("identity-of-arguments", call=lambda block, x: block(x, context=x))
class AsksIdentity(Residual):
    """`if context is x` between two arguments."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.branch(x) if context is x else super().forward(x)


@dataclass
class Context:
    """What a library of today hands from block to block."""

    losses: list[Tensor] = field(default_factory=list)
    h: Tensor | None = None
    scale: float = 1.0


class WritesContext(Residual):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        context.h = self.branch(x)
        context.losses.append(context.h.square().mean())
        context.scale *= 0.9
        return x + context.scale * context.h


@habits.model("context-object", block=WritesContext, loss=with_auxiliary)
class ContextNet(Net):
    """Results written to attributes of a context object."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        context = Context()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, context)
        assert context.h is not None
        return self.head(x + context.h), torch.stack(context.losses).sum()


class CachesKeys(Residual):
    def forward(self, x: Tensor, cache: list[Any], layer: int) -> Tensor:
        keys = self.inner(x)
        cache[layer] = keys if cache[layer] is None else torch.cat([cache[layer], keys])
        y: Tensor = x + self.outer(torch.tanh(cache[layer])).mean(0)
        return y


@habits.model("key-value-cache", block=CachesKeys)
class KeyValueCache(Net):
    """A cache list whose items a block replaces."""

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Any] = [None] * len(self.blocks)
        for part in x.split(2):
            h = self.stem(part)
            for layer, block in enumerate(self.blocks):
                h = block(h, cache, layer)
        first: Tensor = self.head(torch.cat([h, h]))
        return first + sum(each.sum() for each in cache) * 0.01


Pair = namedtuple("Pair", "x memory")


class TakesPair(Residual):
    def forward(self, pair: Any) -> Any:
        memory = pair.memory + super().forward(pair.x)
        return pair._replace(x=self.branch(pair.x), memory=memory)


@habits.model("namedtuple-argument", block=TakesPair)
class PairNet(Net):
    """A namedtuple in and out of each block."""

    def through(self, x: Any) -> Any:
        pair = super().through(Pair(x, torch.zeros_like(x)))
        return pair.x + pair.memory


class KeywordsOnly(Residual):
    def forward(self, *, x: Tensor, mask: Tensor | None = None, **rest: Any) -> Tensor:
        rest["seen"].append(x)
        return super().forward(x if mask is None else x * mask)


@habits.model("keywords-only", block=KeywordsOnly)
class CalledByKeywords(Net):
    """Blocks called by keywords only, with `**kwargs`."""

    def through(self, x: Any) -> Any:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x=x, mask=None, seen=seen)
        return x + seen[0]


@habits.block("none-arguments", call=lambda block, x: block(x, None, (None, None)))
class NonePositional(Residual):
    """`None` among positional arguments (`*args`)."""

    def forward(self, *args: Any) -> Tensor:
        assert args[1] is None
        assert args[2] == (None, None)
        return super().forward(args[0])


@habits.block("mutable-default")
class MutableDefault(Residual):
    """A mutable default argument that counts calls."""

    def forward(self, x: Tensor, seen: dict[str, int] = {}) -> Tensor:  # noqa: B006
        seen["calls"] = seen.get("calls", 0) + 1
        return super().forward(x) * (1.0 if seen["calls"] else 0.0)


class Multiplies(dict):
    """A mapping with a method of its own."""

    def product(self) -> Any:
        return self["a"] * self["b"]


class TakesMapping(Residual):
    def forward(self, both: Multiplies) -> Multiplies:
        both["a"] = super().forward(both["a"])
        both.product().sum()
        return both


@habits.model("mapping-subclass-argument", block=TakesMapping)
class MappingNet(Net):
    """A dict subclass passed through blocks."""

    def through(self, x: Any) -> Any:
        both = Multiplies(a=x, b=torch.sigmoid(x))
        for block in self.blocks:
            assert block(both) is both
        return both.product()
