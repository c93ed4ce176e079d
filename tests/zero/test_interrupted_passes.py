"""A forward or backward that an exception has ended: ``zero_grad`` recovers, a step before it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_input, same, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise FloatingPointError("in backward")


class Fragile(MLP):
    """Raises in the middle of the pass that it is told."""

    broken = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.broken == "forward" and index == 2:
                raise FloatingPointError("bad sample")
            x = layer(x)
            if self.broken == "backward" and index == 1:
                x = BrokenBackward.apply(x)
        return x


@STAGES
@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_exception_on_all_ranks_then_recovery(world: World, stage, broken):
    model = Fragile()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage) as sharding:
        model.broken = broken
        with pytest.raises(FloatingPointError):
            mlp_backward(model, world.rank)
        model.broken = ""
        if broken == "backward":  # some units were reduced: an update would use half a gradient
            said = "the last backward did not finish .*optimizer.zero_grad"
            world.refuses_step(model, optimizer, said)
            with pytest.raises(StepError, match=r"call optimizer\.zero_grad\(\) before"):
                mlp_backward(model, world.rank)
            optimizer.zero_grad()
        world.check(sharding.memory.current.get("unsharded", 0) == 0)
        world.check_trains(model, optimizer)


def zero_one_by_one(model: nn.Module, *_: object) -> None:
    """As a loop of the user's own."""
    for parameter in model.parameters():
        parameter.grad = None


ZEROED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "the model": lambda model, optimizer: model.zero_grad(),
    "one by one": zero_one_by_one,
}


@STAGES
@pytest.mark.parametrize("zero", ZEROED)
def test_what_autograd_left_on_a_parameter_is_gone_with_the_others(world: World, stage, zero):
    model = MLP()
    fails: list[str] = []
    optimizer = sgd(model)

    def fail(parameter: Tensor) -> None:
        if fails:
            raise FloatingPointError(fails.pop())

    model.get_parameter("layers.1.0.weight").register_post_accumulate_grad_hook(fail)
    with world.zeroified(model, optimizer, stage=stage):
        mlp_backward(model, world.rank)
        expected = hpczero.full_gradients(model)
        optimizer.zero_grad()
        fails.append("before any hook of ours has come")
        with pytest.raises(FloatingPointError):
            mlp_backward(model, world.rank)
        ZEROED[zero](model, optimizer)
        mlp_backward(model, world.rank)
        found = hpczero.full_gradients(model)
        world.check(same(list(found.values()), list(expected.values())))


class Interrupted(MLP):
    """Raises when its first layer has run."""

    stop = True

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.layers[0](x)]
        if self.stop:
            raise ValueError("no such input")
        return super().forward(x)


def test_forward_that_ended_by_an_exception_is_not_told_to_return_its_results(world: World, caplog):
    model, outside = Interrupted(), []
    model.layers[0].register_forward_hook(lambda module, args, output: outside.append(output))
    optimizer = adamw(model)
    with (
        caplog.at_level("WARNING", logger="hpczero"),
        world.zeroified(model, optimizer, stage=3, transport="flat"),
    ):
        with pytest.raises(ValueError, match="no such input"):
            model(mlp_input(world.rank))
        told = [record.getMessage() for record in caplog.records]
        world.check(not any("stays whole" in each for each in told), told)
        model.stop = False
        world.check_trains(model, optimizer)
