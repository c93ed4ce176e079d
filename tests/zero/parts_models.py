"""What the tests of the update over long tensors share: models, groups and a loop.

Must not know: what any test looks for.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.small_models import mlp_input

# torch.optim hides the module behind a name that it deletes.
ADAM = importlib.import_module("torch.optim.adam")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as loops do that decay weights alone: neighbours lie in different groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases}]


class Branches(nn.Module):
    """One unit of several layers, of which each step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """(batch, 7) in and out; a layer that is left out of a step has no gradient in it."""
        for place, layer in enumerate(self.layers):
            if (step + place) % 3 or place == 2:
                x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    found: Tensor = model(x, step) if isinstance(model, Branches) else model(x)
    return found.square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range, steps: range) -> None:
    """Steps on the mean over ``ranks`` of their losses."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, mlp_input(rank) + step, step) / len(ranks)).backward()
        optimizer.step()


def lengths_stepped_on(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Elements of each tensor that torch's Adam is given, call by call, from now on."""
    seen: list[list[int]] = []
    adam = ADAM.adam

    def watched(parameters: list[Tensor], *args: Any, **options: Any) -> None:
        seen.append([p.numel() for p in parameters])
        adam(parameters, *args, **options)

    monkeypatch.setattr(ADAM, "adam", watched)
    return seen
