"""Ways in which modules pass tensors to each other, beside arguments and returned tensors. Pure torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 9


class Layers(nn.Module):
    """What the models here have in common: an entry, blocks that are units, a head."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(x), y)


class Mix(nn.Module):
    """Two layers; the base of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Mixed(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x)


# --- arguments that a block writes to


class Appending(Mix):
    def forward(self, x: Tensor, seen: list[Tensor], notes: dict[str, Any]) -> Tensor:
        y = self.mixed(x)
        seen.append(y.square().mean())
        notes[f"skip {len(seen)}"] = torch.sin(y)
        notes["same"] = notes["x"] is x
        return x + y


class Containers(Layers):
    """Losses in a list, shortcuts in a dict; both arguments."""

    def __init__(self) -> None:
        super().__init__(Appending() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        losses: list[Tensor] = []
        notes: dict[str, Any] = {}
        for block in self.blocks:
            notes["x"] = x
            x = block(x, losses, notes)
            assert notes["same"], "the block got another tensor than it was given"
        assert len(losses) == 3, "a list lost what blocks put in"
        return self.loss(x + notes["skip 1"] * notes["skip 2"], y) + sum(losses)


class InPlace(Mix):
    def forward(self, h: Tensor) -> None:
        h += self.mixed(h.clone())


class Row(Mix):
    def forward(self, x: Tensor, out: Tensor, row: int) -> None:
        out[row] = self.mixed(x[row])


class Writers(Layers):
    """Blocks that change an argument in place and return nothing."""

    def __init__(self) -> None:
        super().__init__((InPlace(), Row(), Row(), InPlace()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)
        self.blocks[0](h)
        out = torch.zeros_like(h)
        for row in range(len(out)):
            self.blocks[1 + row % 2](h, out, row)
        self.blocks[3](out)
        return self.loss(out, y)


class Inplaced(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(F.relu(x, inplace=True))


class InplaceRelu(Layers):
    """ReLU(inplace=True) on an argument and on a result that is a view."""

    def __init__(self) -> None:
        super().__init__(Inplaced() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)[None] * 1.0
        for block in self.blocks:
            h = block(h)
            h += 0.5
        return self.loss(h[0], y)


# --- views of parameters


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(7, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, rows: int) -> dict[str, Tensor]:
        return {"rows": self.rows[:rows], "scale": self.scale.expand(rows, -1)}


class Views(Layers):
    """Blocks that return views of their own parameters; one is called twice."""

    def __init__(self) -> None:
        super().__init__((Table(), Mixed(), Table()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)
        first, last = self.blocks[0](len(h)), self.blocks[2](len(h))
        h = self.blocks[1](h * first["scale"] + first["rows"])
        again = self.blocks[0](1)
        return self.loss(h * last["scale"] + last["rows"] * again["rows"], y)


# --- results that torch's pytrees do not see


@dataclass
class Result:
    hidden: Tensor
    losses: list[Tensor] = field(default_factory=list)


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Dict(dict):
    """Not registered with torch's pytrees."""


class Structured(Mix):
    """Returns its result wrapped, never a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = x + self.mixed(x)
        if self.kind == "dataclass":
            return Result(y, [y.square().mean()])
        return Dict(hidden=y) if self.kind == "dict" else Slotted(y)


class Structures(Layers):
    def __init__(self) -> None:
        super().__init__(map(Structured, ("dataclass", "dict", "slots")))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.blocks[0](self.entry(x))
        second = self.blocks[1](first.hidden)
        third = self.blocks[2](second["hidden"])
        return self.loss(third.hidden, y) + sum(first.losses)


class SharedStructure(Layers):
    """One block called three times, with results that pytrees do not see."""

    def __init__(self) -> None:
        super().__init__([Structured("dataclass"), Structured("slots")])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)
        for _ in range(3):
            h = self.blocks[0](h).hidden
        return self.loss(self.blocks[1](h).hidden, y)


class Context:
    """What the blocks of one forward share."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.losses: list[Tensor] = []


class OnObject(Mix):
    def forward(self, context: Context) -> None:
        context.hidden = context.hidden + self.mixed(context.hidden)
        context.losses.append(context.hidden.square().mean())


class Objects(Layers):
    """Blocks that return None and write to an object."""

    def __init__(self) -> None:
        super().__init__(OnObject() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        context = Context(self.entry(x))
        for block in self.blocks:
            block(context)
        return self.loss(context.hidden, y) + sum(context.losses)


class OnAttribute(Mix):
    """Leaves a loss on itself, made after what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mixed(x)
        self.extra = self.router(x).softmax(-1).square().mean()
        return y


class AttributeLosses(Layers):
    def __init__(self) -> None:
        super().__init__(OnAttribute() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        losses: list[Any] = []
        for block in self.blocks:
            x = block(x)
            losses.append(block.extra)
        return self.loss(x, y) + sum(losses)


# --- ways that nobody can see from outside


class Plain(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(x)


class Features(Layers):
    """A forward hook of the user's takes an inner result; the loss is made of that alone, not of what blocks return."""

    def __init__(self) -> None:
        super().__init__(Plain() for _ in range(3))
        self.taken: list[Tensor] = []
        inner = self.blocks[1].get_submodule("inner")
        inner.register_forward_hook(lambda module, args, output: self.taken.append(output))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.taken.clear()
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        del x, y
        return self.taken[0].square().mean()


LOSSES: list[Tensor] = []


class ToGlobal(Mix):
    def forward(self, x: Tensor) -> None:
        LOSSES.append(self.mixed(x).square().mean())


class Globals(Layers):
    """Blocks whose only result lies in a list of the program."""

    def __init__(self) -> None:
        super().__init__(ToGlobal() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        LOSSES.clear()
        h = self.entry(x)
        for block in self.blocks:
            block(h)
        return self.loss(h, y) + sum(LOSSES)


class Late(Layers):
    """The root uses a block's weight before the block is called; its gradient is complete at the very end."""

    def __init__(self) -> None:
        super().__init__(Plain() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.blocks[2].get_parameter("outer.bias")
        x = self.entry(x) * weight
        for block in self.blocks:
            x = block(x)
        return self.loss(x, y)


class Penalty(Layers):
    """The gradient with respect to inputs, inside the loss, as WGAN-GP takes it."""

    def __init__(self) -> None:
        super().__init__(Plain() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
