"""Graphs of gradients, and results that no hook sees, which wait for their backward while others are through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.small_models import MLP, mlp_input, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


Losses = Callable[[nn.Module, Tensor, float], None]


def _two_penalties(model: nn.Module, x: Tensor, share: float) -> None:
    losses = [_penalty(model, x), _penalty(model, 0.5 * x)]
    for loss in losses:
        (loss * share).backward()


def _another_backward_first(model: nn.Module, x: Tensor, share: float) -> None:
    penalty = _penalty(model, x)
    (model(0.5 * x).mean() * share).backward()
    (penalty * share).backward()


def _the_same_forward_first(model: nn.Module, x: Tensor, share: float) -> None:
    x = x.clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.mean() * share).backward(retain_graph=True)
    (slope.square().mean() * share).backward()


LOSSES: dict[str, Losses] = {
    "two penalties": _two_penalties,
    "another backward first": _another_backward_first,
    "the same forward first": _the_same_forward_first,
}


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("transport", ["flat", "window", "hierarchical"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "most are frozen"])
def test_a_graph_of_gradients_outlives_another_backward(world: World, losses, transport, frozen):
    def made() -> MLP:
        model = MLP()
        for layer in model.layers[1:]:
            layer.requires_grad_(not frozen)
        return model

    plain, model = made(), made()
    optimizer = sgd(model)
    for rank in range(world.size):
        LOSSES[losses](plain, mlp_input(rank), 1 / world.size)
    with world.zeroified(model, optimizer, stage=3, transport=transport) as sharding:
        LOSSES[losses](model, mlp_input(world.rank), 1.0)
        world.check_gradients(model, plain)
        optimizer.step()
        world.check(sharding.memory.current.get("unsharded", 0) == 0)


class Hiding(nn.Module):
    """Puts a result, made before the one that it returns, where nobody looks."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((15, 15), 0.1))
        self.later = lambda x: found.append((x @ self.weight).square().sum())

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x @ self.weight)
        self.later(x)
        return out


@pytest.mark.parametrize("transport", ["flat", "window", "hierarchical"])
def test_results_that_no_hook_sees_have_a_backward_each(world: World, transport):
    def run(model: nn.Module, found: list[Tensor], ranks: range, share: float) -> None:
        for rank in ranks:
            found.clear()
            for factor in (1.0, 0.5):
                model(factor * mlp_input(rank))
            for loss in found:
                (loss * share).backward()

    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    plain, model = MLP(), MLP()
    plain.layers[1], model.layers[1] = Hiding(seen[0]), Hiding(seen[1])
    run(plain, seen[0], range(world.size), 1 / world.size)
    with world.zeroified(model, sgd(model), stage=3, transport=transport):
        run(model, seen[1], world.own, 1.0)
        world.check_gradients(model, plain)
