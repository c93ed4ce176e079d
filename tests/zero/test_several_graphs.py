"""Several optimizers and graphs older than a step of one of them: a backward through the parameters of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import hpczero
from tests.helpers.small_models import MLP, mlp_input
from tests.helpers.world import World
from tests.zero.several_models import EPS, STEPS, TOLERANCE, by_shape, loss_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Adversaries(nn.Module):
    """A generator and a discriminator, which are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = MLP((7, 9, 5), seed=1)
        self.discriminator = MLP((5, 9, 1), seed=2)


@STAGES
def test_a_graph_from_before_the_step_of_another_optimizer(world: World, stage):
    """Generator and discriminator: what the generator made is judged before and after the discriminator's step."""

    def made(model: Adversaries) -> tuple[Optimizer, Optimizer]:
        return (
            Adam(model.generator.parameters(), lr=1e-2, eps=EPS),
            SGD(model.discriminator.parameters(), lr=0.05, momentum=0.9),
        )

    def step(model: Adversaries, optimizers: Any, ranks: range, share: float) -> None:
        generator, discriminator = optimizers
        fakes = [model.generator(mlp_input(rank)) for rank in ranks]
        discriminator.zero_grad()
        for rank, fake in zip(ranks, fakes, strict=True):
            real = model.discriminator(mlp_input(rank + 5)[:, :5])
            loss = real.square().mean() - model.discriminator(fake.detach()).mean()
            (loss * share).backward()
        discriminator.step()
        generator.zero_grad()
        for fake in fakes:
            (model.discriminator(fake).square().mean() * share).backward()
        generator.step()  # the discriminator has gradients of this loss, too, and drops them

    model, plain = Adversaries(), Adversaries()
    optimizers, references = made(model), made(plain)
    with world.zeroified(model, optimizers, stage=stage):
        for _ in range(STEPS):
            step(model, optimizers, world.own, 1.0)
            step(plain, references, range(world.size), 1 / world.size)
        world.check_weights(model, plain, within=TOLERANCE)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_that_needs_what_the_step_has_changed_is_refused_as_in_torch(world: World, stage):
    with world.mlp(by_shape, stage=stage) as (model, (first, second)):
        old = loss_of(model, world.rank, 1)
        loss_of(model, world.rank, 0).backward()
        first.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        second.zero_grad()


@STAGES
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_a_graph_that_kept_units_whole_over_a_step(world: World, stage, transport):
    """Of vectors alone, which the step of the matrices' optimizer does not change; but every unit has both."""
    model, plain = MLP(), MLP()
    first, second = by_shape(model)

    def penalty(of: nn.Module) -> torch.Tensor:
        return torch.stack([(p**3).sum() for p in of.parameters() if p.dim() == 1]).sum()

    with world.zeroified(model, (first, second), stage=stage, transport=transport):
        with hpczero.gathered(model):
            kept = penalty(model)
        loss_of(model, world.rank, 0).backward()
        first.step()
        model.zero_grad()
        if stage == 3:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()
        else:
            kept.backward()
            penalty(plain).backward()
            world.check_gradients(model, plain)
        model.zero_grad()
        loss_of(model, world.rank, 0).backward()
        second.step()
