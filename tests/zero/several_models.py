"""What the tests of several optimizers share: two trainings side by side, models, and how these are divided.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.zero.sharding import KEY
from tests.helpers.small_models import MLP, mlp_input, tiny_gpt, tiny_tokens

STEPS = 6
# fp32; the sum over ranks has another order.
TOLERANCE = 1e-5
EPS = 1e-3  # key biases of a GPT have gradients of rounding and nothing else, which Adam must not blow up


@dataclass
class Side:
    """One of two trainings that are compared: of all ranks in plain torch, or of this rank in shards."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    ranks: range
    size: int
    schedulers: Sequence[LambdaLR] = ()

    @property
    def is_sharded(self) -> bool:
        return KEY in vars(self.model)

    def backward(self, step: int) -> None:
        """Of the mean over all ranks."""
        for rank in self.ranks:
            loss = loss_of(self.model, rank, step)
            (loss if self.is_sharded else loss / self.size).backward()

    def clip(self, max_norm: float) -> None:
        """Over all parameters."""
        if self.is_sharded:
            hpczero.clip_grad_norm_(self.model, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        return hpczero.no_sync(self.model) if self.is_sharded else nullcontext()

    def step(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    if isinstance(model, MLP):
        found: Tensor = model(mlp_input(rank) + 0.3 * step).square().sum()
        return found
    tokens = tiny_tokens(rank + 7 * step)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


# --- models and how their parameters are divided


def by_shape(model: nn.Module) -> tuple[Optimizer, ...]:
    """Matrices and vectors: every unit has both."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() <= 1]
    return AdamW(matrices, lr=1e-2, weight_decay=0.1, eps=EPS), SGD(vectors, lr=0.05, momentum=0.9)


def by_unit(model: nn.Module) -> tuple[Optimizer, ...]:
    """The first block and the rest: every unit has one optimizer."""
    blocks = [p for n, p in model.named_parameters() if n.split(".")[1:2] == ["0"]]
    known = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in known]
    return Adam(blocks, lr=1e-2, eps=EPS), SGD(rest, lr=0.05, momentum=0.9, nesterov=True)


def in_three(model: nn.Module) -> tuple[Optimizer, ...]:
    """By turns, one of them with two groups, one with state from the start."""
    parts: list[list[nn.Parameter]] = [[], [], [], []]
    for place, parameter in enumerate(model.parameters()):
        parts[place % 4].append(parameter)
    groups: list[dict[str, Any]] = [{"params": parts[0]}, {"params": parts[2], "lr": 3e-3}]
    return (
        AdamW(groups, lr=1e-2, eps=EPS),
        RMSprop(parts[1], lr=1e-3, eps=EPS),
        Adagrad(parts[3], lr=0.02, eps=EPS),
    )


def frozen_mlp() -> MLP:
    """One layer frozen as a whole, of another one the bias."""
    model = MLP()
    for name, parameter in model.named_parameters():
        if name.startswith("layers.1.") or name == "layers.2.0.bias":
            parameter.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "gpt": tiny_gpt, "frozen": frozen_mlp}
DIVISIONS = {"by shape": by_shape, "by unit": by_unit, "in three": in_three}
