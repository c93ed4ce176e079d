# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Weights that are shared, frozen, parametrized, lazy or in containers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.compat.construct import WIDTH, Habits, Net, Residual, in_blocks
from tests.compat.layers import Words, words

habits = Habits()


def tie(model: Any) -> None:
    """Tokens in, tokens out, one table."""
    model.head = nn.Linear(WIDTH, 7, bias=False)
    model.head.weight = model.stem.weight


@habits.loss("tied-weights", model=Words, change=tie, batch=words)
def next_word(model: nn.Module, batch: Any) -> Tensor:
    """Embedding and head share one weight."""
    return F.cross_entropy(model(batch[0]), batch[0][:, 0])


@habits.change("tied-layers")
def share_layer(model: Any) -> None:
    """Blocks share a layer."""
    for other in model.blocks[1:]:
        other.inner = model.blocks[0].inner


@habits.model("weights-shared-in-time")
class Universal(Net):
    """One block called four times (ALBERT, Universal Transformer).

    One block, as often as there are layers: ALBERT, Universal Transformer.
    """

    def through(self, x: Any) -> Any:
        for block in [self.blocks[0]] * 4 + [*self.blocks[1:]]:
            x = block(x)
        return x


@habits.change("block-twice-in-list")
def list_block_twice(model: Any) -> None:
    """One block at two places of a `ModuleList`."""
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0]])


@habits.change("frozen-backbone")
def freeze(model: Any) -> None:
    """A frozen backbone."""
    model.stem.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)


@habits.model("frozen-no-grad", change=freeze)
class WithoutGradBelow(Net):
    """A frozen backbone under `no_grad`."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[2](x))


@habits.change("bias-only")
def train_biases(model: Any) -> None:
    """Only biases train (BitFit).

    BitFit: frozen weights beside trained biases in each layer.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or name.startswith("head"))


@habits.block("lora-by-hand")
class Adapter(nn.Module):
    """LoRA by hand in each block.

    LoRA by hand: a frozen layer and two small ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Unused(Net):
    """A block that no forward uses, and a parameter that nothing uses."""

    def through(self, x: Any) -> Any:
        return self.blocks[1](self.blocks[0](x))


@habits.change("unused-parts", model=Unused)
def add_spare(model: Any) -> None:
    """A block and a parameter that nothing uses."""
    model.spare = nn.Parameter(torch.ones(5))


@habits.block("parameter-containers")
class ParameterContainers(nn.Module):
    """`nn.ParameterList`, `nn.ParameterDict`, 0-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2))
        self.scales = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.tensor(0.5)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x + torch.tanh(x @ matrix) * self.scales["a"]
        return x * self.scales["b"]


@habits.block("module-dict")
class ModuleTable(nn.Module):
    """`nn.ModuleDict` in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict(
            {"even": nn.Linear(WIDTH, WIDTH), "odd": nn.Linear(WIDTH, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(
            torch.arange(4)[:, None] % 2 == 0, self.kinds["even"](x), self.kinds["odd"](x)
        )


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@habits.build("lazy")
def initialized_lazy() -> nn.Module:
    """`nn.LazyLinear` after its first call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Net(Lazy)
        model(torch.ones(1, WIDTH))
    return model


@habits.change("weight-norm-old")
@in_blocks
def weight_norm_of_old(block: Any) -> None:
    """`nn.utils.weight_norm`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(block.inner)


@habits.change("orthogonal")
@in_blocks
def orthogonal(block: Any) -> None:
    """`parametrizations.orthogonal`."""
    parametrizations.orthogonal(block.outer, orthogonal_map="cayley")


@habits.block("buffers-in-forward")
class CountsCalls(Residual):
    """Buffers that forward updates.

    A running mean that forward updates, without BatchNorm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.linspace(0.5, 1.0, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.calls += 1
        return super().forward(x - self.seen.clone()) * self.table


@habits.block("experts")
class Experts(nn.Module):
    """Mixture of experts: routing by data, every expert runs.

    Each token goes to its best expert; all experts run, on what they get.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = torch.nonzero(choice == index).squeeze(1)
            out = out.index_add(0, chosen, weight[chosen, None] * expert(x[chosen]))
        return x + out


@habits.block("experts-stacked")
class StackedExperts(nn.Module):
    """Experts stacked in one parameter, taken by index."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        return x + weight[:, None] * torch.einsum("bi,bij->bj", x, self.weight[choice])


class RenormedLinear(nn.Linear):
    """A bound on the norms of weights, kept by every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


@habits.change(
    "renormed-in-forward",
    refused="got new memory since zeroify",
    remark="renormalise inside `gathered(model, modifier_rank=0)` after the step",
)
@in_blocks
def renorm(block: Any) -> None:
    """`self.weight.data = torch.renorm(self.weight.data, ...)` in forward."""
    block.inner = RenormedLinear(WIDTH, WIDTH + 1)


habits.add(
    "lazy-too-early",
    "`nn.LazyLinear` before its first call",
    build=lambda: Net(Lazy),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    refused="a lazy module takes its shape from its first input",
    remark="call the model once before",
)
habits.add(
    "weight-norm",
    "`parametrizations.weight_norm`",
    change=in_blocks(lambda block: parametrizations.weight_norm(block.inner)),
)
habits.add(
    "spectral-norm",
    "`parametrizations.spectral_norm`",
    change=in_blocks(lambda block: parametrizations.spectral_norm(block.inner)),
)
