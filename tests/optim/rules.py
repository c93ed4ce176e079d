"""What the tests of whole-parameter optimizers share: a model with odd matrices, the optimizers, one loop.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import hpczero
from hpczero.optim import AdamW8bit, Muon, Shampoo
from tests.helpers.small_models import update

if TYPE_CHECKING:
    from hpczero import Topology

BATCH = 6  # of all ranks together
STEPS = 4


class Zoo(nn.Module):
    """Tied table, matrices wide, tall and square, a stack of them, vectors, a number, frozen parts, one that idles."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 7)) for _ in range(2)
        )
        self.square = nn.Linear(7, 7, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 7, 5))
        self.frozen = nn.Linear(5, 7)
        self.idle = nn.Linear(3, 7)  # has a gradient from the third step on
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(7, 23, bias=False)
        self.head.weight = self.table.weight
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, *, idles: bool = False) -> Tensor:
        """(batch, length) int64 in, (batch, length, 23) out."""
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.square(x if idles else x + self.idle(x[..., :3]))
        x = x + self.frozen(torch.stack([x @ expert for expert in self.experts]).tanh().mean(0))
        logits: Tensor = self.head(x * (1 + self.scale))
        return logits


def tokens(step: int) -> Tensor:
    """(BATCH, 10) int64 of all ranks."""
    return torch.randint(23, (BATCH, 10), generator=torch.Generator().manual_seed(50 + step))


def loss_of(model: nn.Module, batch: Tensor, step: int) -> Tensor:
    logits = model(batch[:, :-1], idles=step < 2)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Lamb(Optimizer):
    """Momentum scaled by the norm of the parameter over that of the update: whole, whatever the shape."""

    hpczero_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["seen"], state["mean"] = 0, torch.zeros_like(p)
                    state["seen"] += 1
                    mean = state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                    change = mean / (1 - 0.9 ** state["seen"])
                    p.sub_(change * (group["lr"] * p.norm() / (change.norm() + 1e-12)))


Make = Callable[[nn.Module], tuple[Optimizer, ...]]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices but for the table, and all else."""
    apart = {id(model.table.weight)} if isinstance(model, Zoo) else set()
    matrices = [p for p in trained(model) if p.dim() == 2 and id(p) not in apart]
    known = {id(p) for p in matrices}
    return matrices, [p for p in trained(model) if id(p) not in known]


def stock_muon(parameters: Any, **options: Any) -> Optimizer:
    """torch.optim.Muon; skips the test where this torch has none."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch.optim.Muon came with torch 2.9; this is {torch.__version__}")
    return torch.optim.Muon(parameters, **options)


def torchs_muon(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, rest = divided(model)
    return stock_muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3, eps=1e-4)


def muon(model: nn.Module) -> tuple[Optimizer, ...]:
    return (Muon.of(model, lr=0.02, adamw_lr=3e-3, eps=1e-4),)


def adafactor(model: nn.Module) -> tuple[Optimizer, ...]:
    return (torch.optim.Adafactor(trained(model), lr=0.02),)


def shampoo(model: nn.Module) -> tuple[Optimizer, ...]:
    return (Shampoo(trained(model), lr=0.02, every=2, max_size=11, least=1e-3),)


def lamb(model: nn.Module) -> tuple[Optimizer, ...]:
    return (Lamb(trained(model)),)


RULES: dict[str, Make] = {
    "torchs muon": torchs_muon,
    "muon": muon,
    "adafactor": adafactor,
    "lamb": lamb,
    "shampoo": shampoo,
}


def adamw8bit(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, rest = divided(model)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    return (AdamW8bit(groups, lr=3e-3, eps=1e-4),)


class Training:
    """A ``Zoo`` in training by some optimizers; of all ranks in plain torch, or of this rank in shards."""

    def __init__(
        self, make: Make, topology: Topology | None, model: nn.Module | None = None, **options: Any
    ) -> None:
        self.topology, self.step = topology, 0
        self.model = model or Zoo()
        self.optimizers = make(self.model)
        if topology is not None:
            hpczero.zeroify(self.model, self.optimizers, topology=topology, **options)

    def train(self, steps: int = STEPS) -> None:
        assert self.topology is not None, "train_as trains in plain torch"
        self._train(steps, [self.topology.rank], self.topology.size, 1)

    def train_as(self, size: int, steps: int = STEPS) -> None:
        """In plain torch what so many ranks do: the mean of their losses, one backward after the other."""
        self._train(steps, range(size), size, size)

    def _train(self, steps: int, ranks: Sequence[int], size: int, divisor: int) -> None:
        share = BATCH // size
        for _ in range(steps):
            for rank in ranks:
                mine = tokens(self.step)[rank * share :][:share]
                (loss_of(self.model, mine, self.step) / divisor).backward()
            update(*self.optimizers)
            self.step += 1

    def close(self) -> None:
        if self.topology is not None:
            hpczero.release(self.model)


def stack_and_its_matrices(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> tuple[Tensor, Tensor]:
    """A stack after three steps, and its matrices after the same as parameters of their own."""
    generator = torch.Generator().manual_seed(1)
    stack = nn.Parameter(torch.randn(3, 7, 5, generator=generator))
    each = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    ours, theirs = make([stack]), make(each)
    for _ in range(3):
        stack.grad = torch.randn(3, 7, 5, generator=generator)
        for matrix, gradient in zip(each, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        ours.step()
        theirs.step()
    return stack.detach(), torch.stack([*each]).detach()


@contextmanager
def torchs_iteration_in_fp32() -> Iterator[None]:
    """Context: torch.optim.Muon orthogonalises what it is given instead of its bf16 roundings."""

    with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone()):
        yield


def same_bits(found: Sequence[dict[str, Tensor] | None]) -> bool:
    """Whether the dictionaries, on rank 0, hold the same."""
    if found[0] is None:
        return True
    return all(torch.equal(v, (each or {})[n]) for each in found for n, v in found[0].items())
