"""The zoo: small models, each with a habit that sharding could get wrong. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.convnet import ConvNet
from hpczero.models import GPT, GPTConfig
from tests.helpers.small_models import seeded

WIDTH = 9  # of Stack's blocks; 363 elements each, which no number of ranks from 2 to 5 divides


def gpt(**changes: object) -> GPT:
    """The project's GPT, two blocks of awkward width; tied and with learned positions unless changed."""
    sizes = {"vocab_size": 61, "context": 10, "layers": 2, "hidden": 18, "heads": 3}
    return seeded(lambda: GPT(GPTConfig(**(sizes | changes))))  # type: ignore[arg-type]


def convnet() -> ConvNet:
    """The project's conv net with BatchNorm; running statistics start away from 0 and 1."""
    model = seeded(lambda: ConvNet(channels=3, classes=5, width=6, blocks=2))
    generator = torch.Generator().manual_seed(8)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.3, generator=generator)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5, generator=generator)
    return model


class AwkwardMLP(nn.Module):
    """7x15 and 15x3, one scalar, one parameter of two elements and one of none: most ranks own nothing of some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.second = nn.Linear(15, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor([0.2, -0.4]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.scale + self.empty.sum()
        return y + torch.cat((self.shift, self.shift[:1]))


class Block(nn.Module):
    """Two layers around a tanh, beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Stack(nn.Module):
    """Three blocks, each a unit by the default rule, between layers that belong to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def block(self, index: int) -> Block:
        """One of the blocks."""
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CheckpointedStack(Stack):
    """Blocks keep only their input and run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class TwiceStack(Stack):
    """Each block is called twice in a forward, and the calls of different blocks interleave."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def tied_stack() -> Stack:
    """One weight in two units, and one of the root shared with nobody."""
    model = Stack()
    first, last = model.block(0), model.block(2)
    last.inner.weight = first.inner.weight
    last.outer.bias = first.outer.bias
    return model


class BranchedStack(Stack):
    """Two layers of the root module of which the caller picks some: a bit of ``branches`` for each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, branches: int) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        hidden = torch.tanh(self.entry(x))
        if branches & 1:
            y = y + self.left(hidden)
        if branches & 2:
            y = y + self.right(hidden)
        return y


class SkippingStack(Stack):
    """Whole blocks are left out at the caller's wish: a bit of ``blocks`` for each one that runs."""

    def forward(self, x: Tensor, blocks: int) -> Tensor:  # type: ignore[override]
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            if blocks >> index & 1:
                x = block(x)
        return self.head(x)


class IdleStack(Stack):
    """Holds parameters that no forward uses: one within each block, one of the root, and a whole block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.idle = nn.Parameter(torch.full((4,), 0.7))
        self.idle = nn.Parameter(torch.full((3,), -0.6))
        self.blocks.append(Block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in list(self.blocks)[:3]:
            x = block(x)
        return self.head(x)


class StoppedStack(Stack):
    """The first block runs without gradient, the second has inputs that need none and an output changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        first, second, third = self.blocks
        with torch.no_grad():
            x = first(x)
        return self.head(third(second(x).relu_()))


class TwoHeadedBlock(nn.Module):
    """Takes two tensors, uses one, and returns two in a dictionary: its second layer trains only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, *, ignored: Tensor) -> dict[str, Tensor]:
        del ignored
        return {"main": x + torch.tanh(self.main(x)), "side": self.side(x)}


class TwoHeadedStack(nn.Module):
    """Blocks with structured inputs and outputs, of which the loss uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, WIDTH)
        self.ignored = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(TwoHeadedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, ignored = self.entry(x), self.ignored(x)
        sides = []
        for block in self.blocks:
            out = block(y, ignored=ignored)
            y = out["main"]
            sides.append(out["side"])
        return self.head(y), sides
