"""Several optimizers: what zeroify does not take, and what ranks must do alike; named errors on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import hpczero
from hpczero.errors import PlanError, StepError
from tests.helpers.small_models import MLP, mlp_backward
from tests.helpers.world import World
from tests.zero.several_models import by_shape

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def given(model: MLP) -> dict[str, tuple[Any, str]]:
    """Optimizers that are refused, each with what is said."""
    matrices, vectors = by_shape(model)
    overlapping = SGD(model.layers[1].parameters(), lr=0.1)
    foreign = SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    return {
        "none": ((), "got an empty tuple"),
        "no optimizer": ([matrices, 0.1], "got float, expected a torch.optim.Optimizer"),
        "the same twice": ((matrices, matrices), "the same optimizer twice"),
        "one parameter in two": (
            (matrices, vectors, overlapping),
            r"'layers.1.0.weight' is in 2 optimizers, expected one",
        ),
        "a parameter in none": (
            (matrices,),
            r"3 trainable parameter\(s\) are in no optimizer group, first 'layers.0.0.bias'",
        ),
        "of another model": (
            (matrices, vectors, foreign),
            r"1 tensor\(s\) that are not parameters",
        ),
        "not elementwise": (
            (matrices, torch.optim.LBFGS(model.parameters())),
            "optimizer LBFGS couples the elements of all parameters",
        ),
    }


@pytest.mark.parametrize("case", given(MLP()))
def test_zeroify_refuses(world: World, case):
    model = MLP()
    optimizers, message = given(model)[case]
    before = [parameter.clone() for parameter in model.parameters()]
    world.raises(PlanError, message, world.zeroified(model, optimizers).__enter__)
    world.check(all(map(torch.equal, model.parameters(), before)))


@pytest.mark.ranks(2, 3)
def test_optimizers_in_another_order_on_one_rank(world: World):
    model = MLP()
    optimizers = by_shape(model)[:: -1 if world.rank else 1]
    said = "built another model, optimizer, stage or precision than rank 0"
    world.raises(PlanError, said, world.zeroified(model, optimizers).__enter__)


@STAGES
@pytest.mark.ranks(2, 3)
def test_another_optimizer_steps_on_one_rank(world: World, stage):
    model = MLP()
    parts = [[p for p in model.parameters() if (p.dim() > 1) is even] for even in (True, False)]
    optimizers = tuple(AdamW(part, lr=0.01) for part in parts)  # by their options they are equal
    with world.zeroified(model, optimizers, stage=stage):
        mlp_backward(model, world.rank)
        said = r"a step of optimizer 1 \(AdamW\), where rank 0 has a step of optimizer 0 \(AdamW\)"
        world.raises(StepError, said, optimizers[world.rank == world.size - 1].step)


@STAGES
@pytest.mark.ranks(2, 3)
def test_one_rank_zeroes_the_gradients_of_one_optimizer(world: World, stage):
    with world.mlp(by_shape, stage=stage) as (model, (first, second)):
        mlp_backward(model, world.rank)
        first.step()
        if world.rank == 0:
            first.zero_grad()
        world.raises(StepError, "zero_grad of one optimizer", second.step)


def test_a_group_added_to_one_of_them(world: World):
    with world.mlp(by_shape) as (model, (first, second)):
        second.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        mlp_backward(model, world.rank)
        said = r"group 1 of optimizer 1 \(SGD\) has 1 parameter\(s\) put in"
        world.raises(StepError, said, first.step)


def test_state_of_another_of_them(world: World):
    model = MLP()
    parts = [list(model.layers[0].parameters()), list(model.layers[1].parameters())]
    parts[1] += model.layers[2].parameters()
    optimizers = tuple(AdamW(part[:2], lr=0.01) for part in parts)
    optimizers[1].add_param_group({"params": parts[1][2:]})
    with world.zeroified(model, optimizers, stage=0):
        mlp_backward(model, world.rank)
        for optimizer in optimizers:
            optimizer.step()
        state = optimizers[0].state_dict()
        pattern = "optimizer 0 of 2, expected one of .*optimizer 1 of 2"
        with pytest.raises(StepError, match=pattern):
            optimizers[1].load_state_dict(state)


def test_the_only_optimizer_is_asked_for(world: World):
    with world.mlp(by_shape) as (model, optimizers):
        sharding = hpczero.sharding(model)
        world.check(tuple(sharding.optimizers) == optimizers)
        with pytest.raises(PlanError, match=r"2 optimizers \(AdamW, SGD\)"):
            _ = sharding.optimizer


def test_release_leaves_every_optimizer_to_plain_torch(world: World):
    with world.mlp(by_shape, stage=0) as (_, optimizers):
        pass
    for optimizer in optimizers:
        world.check(not optimizer._optimizer_step_pre_hooks)
        world.check("zero_grad" not in vars(optimizer))


@pytest.mark.parametrize("to_none", [True, False])
def test_an_interrupted_backward_needs_the_gradients_of_all_to_go(world: World, to_none):
    with world.mlp(by_shape, stage=2) as (model, (first, second)):
        mlp_backward(model, world.rank)
        hook = next(model.parameters()).register_hook(lambda gradient: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            mlp_backward(model, world.rank)
        hook.remove()
        first.zero_grad(set_to_none=to_none)
        world.raises(StepError, "the last backward did not finish", first.step)
        second.zero_grad(set_to_none=to_none)
        mlp_backward(model, world.rank)
        first.step()
        second.step()
