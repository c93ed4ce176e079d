# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Weights that are shared, frozen, parametrized, lazy or in containers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.compat.construct import WIDTH, Construct, Net, Residual, in_blocks, net
from tests.compat.layers import Words, words


def tie(model: Any) -> None:
    """Tokens in, tokens out, one table."""
    model.head = nn.Linear(WIDTH, 7, bias=False)
    model.head.weight = model.stem.weight


def next_word(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[0][:, 0])


def share_layer(model: Any) -> None:
    for other in model.blocks[1:]:
        other.inner = model.blocks[0].inner


class Universal(Net):
    """One block, as often as there are layers: ALBERT, Universal Transformer."""

    def through(self, x: Any) -> Any:
        for block in [self.blocks[0]] * 4 + [*self.blocks[1:]]:
            x = block(x)
        return x


def list_block_twice(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0]])


def freeze(model: Any) -> None:
    model.stem.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)


class WithoutGradBelow(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[2](x))


def train_biases(model: Any) -> None:
    """BitFit: frozen weights beside trained biases in each layer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or name.startswith("head"))


class Adapter(nn.Module):
    """LoRA by hand: a frozen layer and two small ones."""

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


def add_spare(model: Any) -> None:
    model.spare = nn.Parameter(torch.ones(5))


class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2))
        self.scales = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.tensor(0.5)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x + torch.tanh(x @ matrix) * self.scales["a"]
        return x * self.scales["b"]


class ModuleTable(nn.Module):
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


def initialized_lazy() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Net(Lazy)
        model(torch.ones(1, WIDTH))
    return model


def weight_norm_of_old(block: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(block.inner)


def orthogonal(block: Any) -> None:
    parametrizations.orthogonal(block.outer, orthogonal_map="cayley")


class CountsCalls(Residual):
    """A running mean that forward updates, without BatchNorm."""

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


class Experts(nn.Module):
    """Each token goes to its best expert; all experts run, on what they get."""

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


class StackedExperts(nn.Module):
    """All experts in one parameter, by index."""

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


def renorm(block: Any) -> None:
    block.inner = RenormedLinear(WIDTH, WIDTH + 1)


CONSTRUCTS = [
    Construct(
        "tied-weights",
        "embedding and head share one weight",
        net(kind=Words, change=tie),
        batch=words,
        loss=next_word,
    ),
    Construct(
        "renormed-in-forward",
        "`self.weight.data = torch.renorm(self.weight.data, ...)` in forward",
        net(change=in_blocks(renorm)),
        refused="got new memory since zeroify",
        remark="renormalise inside `gathered(model, modifier_rank=0)` after the step",
    ),
    Construct("tied-layers", "blocks share a layer", net(change=share_layer)),
    Construct(
        "weights-shared-in-time",
        "one block called four times (ALBERT, Universal Transformer)",
        net(kind=Universal),
    ),
    Construct(
        "block-twice-in-list",
        "one block at two places of a `ModuleList`",
        net(change=list_block_twice),
    ),
    Construct("frozen-backbone", "a frozen backbone", net(change=freeze)),
    Construct(
        "frozen-no-grad",
        "a frozen backbone under `no_grad`",
        net(kind=WithoutGradBelow, change=freeze),
    ),
    Construct("bias-only", "only biases train (BitFit)", net(change=train_biases)),
    Construct("lora-by-hand", "LoRA by hand in each block", net(Adapter)),
    Construct(
        "unused-parts",
        "a block and a parameter that nothing uses",
        net(kind=Unused, change=add_spare),
    ),
    Construct(
        "parameter-containers",
        "`nn.ParameterList`, `nn.ParameterDict`, 0-dimensional parameters",
        net(ParameterContainers),
    ),
    Construct("module-dict", "`nn.ModuleDict` in a block", net(ModuleTable)),
    Construct("lazy", "`nn.LazyLinear` after its first call", initialized_lazy),
    Construct(
        "lazy-too-early",
        "`nn.LazyLinear` before its first call",
        lambda: Net(Lazy),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        refused="a lazy module takes its shape from its first input",
        remark="call the model once before",
    ),
    Construct(
        "weight-norm",
        "`parametrizations.weight_norm`",
        net(change=in_blocks(lambda block: parametrizations.weight_norm(block.inner))),
    ),
    Construct(
        "weight-norm-old", "`nn.utils.weight_norm`", net(change=in_blocks(weight_norm_of_old))
    ),
    Construct("orthogonal", "`parametrizations.orthogonal`", net(change=in_blocks(orthogonal))),
    Construct(
        "spectral-norm",
        "`parametrizations.spectral_norm`",
        net(change=in_blocks(lambda block: parametrizations.spectral_norm(block.inner))),
    ),
    Construct("buffers-in-forward", "buffers that forward updates", net(CountsCalls)),
    Construct("experts", "mixture of experts: routing by data, every expert runs", net(Experts)),
    Construct(
        "experts-stacked", "experts stacked in one parameter, taken by index", net(StackedExperts)
    ),
]
