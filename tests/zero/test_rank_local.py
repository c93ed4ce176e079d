"""What one rank alone does in its program: it changes no other rank's results, and no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_input, same, sgd, squares, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

TRANSPORTS = pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])


def _train(
    world: World, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3
) -> list[Tensor]:
    for step in range(steps):
        model(mlp_input(10 * step + world.rank)).square().mean().backward()
        update(optimizer)
    with hpczero.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


LOGGERS: dict[str, Callable[[list[Any], Tensor], None]] = {
    "norm": lambda log, out: log.append(out.norm().item()),
    "norm with its graph": lambda log, out: log.append(out.norm()),
    "detached": lambda log, out: log.append(out.detach().norm()),
}


@TRANSPORTS
@pytest.mark.parametrize("place", ["block", "layer"])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_hook_that_logs_on_one_rank_alone(world: World, transport, place, logger):
    found = []
    for logs in (False, True):
        log: list[Any] = []
        with world.mlp(sgd, stage=3, transport=transport) as (model, optimizer):
            if logs and world.rank == world.size - 1:
                chosen = model.get_submodule("layers.1" if place == "block" else "layers.1.1")
                hook = lambda module, args, out, log=log: LOGGERS[logger](log, out)  # noqa: E731
                chosen.register_forward_hook(hook)
            found.append(_train(world, model, optimizer))
        world.check(bool(log) == (logs and world.rank == world.size - 1))
    world.check(same(*found), "logging changes the result")


class Matches(nn.Module):
    """Returns lists beside its tensor, as many as its batch has matches: on some ranks more than are searched."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.many = many
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[list[int]]]:
        return self.linear(x), self.linear.weight[:2], [[0] for _ in range(self.many)]


class Detector(nn.Module):
    def __init__(self, many: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Matches(many) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x, weight, _ = block(x)
            kept.append(weight)
        return x + sum(weight.sum() for weight in kept)


@TRANSPORTS
def test_one_rank_returns_more_than_is_searched(world: World, transport):
    found = []
    for many in (3, 11_000):
        torch.manual_seed(1)
        model = Detector(many if world.rank == 0 else 3)
        optimizer = sgd(model)
        with world.zeroified(model, optimizer, stage=3, transport=transport):
            found.append(_train(world, model, optimizer))
            with torch.no_grad():
                model(mlp_input(world.rank))  # returns views of weights, which are given back
    world.check(same(*found), "the number of lists changes the result")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("by", ["groups", "model", "zero_grad"])
def test_a_parameter_that_is_used_in_the_first_step_alone_rests_afterwards(world: World, stage, by):
    def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if by == "zero_grad":
            optimizer.zero_grad()
        parameters = optimizer.param_groups[0]["params"] if by == "groups" else model.parameters()
        for parameter in parameters:
            parameter.grad = None

    def train(model: Any, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
        for step in range(4):
            losses = []
            for rank in ranks:
                x = mlp_input(10 * step + rank)
                x = model.layers[0](x) if step == 0 else x.tile(1, 3)[:, :15].detach()
                losses.append(model.layers[2](model.layers[1](x)).square().mean())
            sum(losses, torch.zeros(())).div(len(ranks)).backward()
            optimizer.step()
            clear(model, optimizer)

    plain, model = MLP(), MLP()
    train(plain, adamw(plain, weight_decay=0.1), list(range(world.size)))
    optimizer = adamw(model, weight_decay=0.1)
    with world.zeroified(model, optimizer, stage=stage):
        train(model, optimizer, [world.rank])
        world.check_weights(model, plain, within=1e-5)


def test_pieces_set_to_none_between_two_backwards_of_a_step_are_refused(world: World):
    with world.mlp(sgd, stage=2) as (model, optimizer):
        for _ in range(2):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = None
            model(mlp_input(world.rank)).sum().backward()
        world.raises(StepError, "set to None between two backwards", optimizer.step)
        optimizer.zero_grad()
        _train(world, model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_values_changed_before_a_step_that_is_skipped_stand(world: World, stage, transport):
    plain, model = MLP(), MLP()
    reference, optimizer = sgd(plain), sgd(model)

    precision = hpczero.Precision(nonfinite="skip")
    with world.zeroified(model, optimizer, stage=stage, transport=transport, precision=precision):
        for scale in (1.0, float("inf"), 1.0):
            world.backward(model, plain, lambda m, rank, scale=scale: squares(m, rank) * scale)
            with torch.no_grad():
                for each in (optimizer, reference):
                    for parameter in each.param_groups[0]["params"]:
                        parameter.mul_(0.75)
            if scale == 1.0:
                reference.step()
            reference.zero_grad()
            update(optimizer)
        world.check_weights(model, plain, within=1e-5)


@TRANSPORTS
@pytest.mark.parametrize("rank", [0, 1])
def test_a_buffer_that_is_gone_on_one_rank_is_refused(world: World, transport, rank):
    model = MLP()
    model.register_buffer("first", torch.full((4,), 2.0))
    model.register_buffer("second", torch.ones(5))
    optimizer = sgd(model)
    with world.zeroified(model, optimizer, transport=transport):
        model(mlp_input(world.rank)).sum().backward()
        if world.rank == rank:
            model.first = None  # type: ignore[assignment]
        world.raises(StepError, "no buffer first", optimizer.step)
        second = model.get_buffer("second")
        world.check(bool((second == 1).all()), second)
