"""A number to read later: it is that of ``item()``, and a step that looks at a device anyway brings it along."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.errors import ConfigError
from hpczero.plan.precision import Precision
from hpczero.run.evaluation import PlainPasses
from hpczero.run.step import TrainingStep
from scaling.overhead.steps import Waits
from tests.helpers.small_models import MLP, adamw, mlp_input, squares
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = (0, 1, 2, 3)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """The other AdamW asks for its counters, which lie on the host whatever the device."""
    return adamw(model, fused=True)


def asked(stage: int, world: World) -> int:
    """Once; at stage 0 of several ranks once more, for what they hold alike."""
    return 1 + (stage == 0 and world.size > 1)


def waits(call: Callable[[], object]) -> int:
    """Numbers that ``call`` asks of tensors."""
    with Waits() as counted:
        call()
    return sum(counted.found.values())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_reads_the_loss_along(world: World, norm_type):
    with world.mlp(adamw, stage=1) as (model, _):
        loss = squares(model, world.rank)
        loss.backward()
        value = hpczero.read_later(model, loss)
        clipping = waits(lambda: hpczero.clip_grad_norm_(model, 0.1, norm_type))
        # A rank that owns nothing has no norm to ask for, and asks for the loss alone.
        world.check(clipping + waits(value) == 1, f"{clipping}")
        world.check(clipping == 1 or world.rank == 2)
        world.check(value() == loss.item(), f"{value()} {loss.item()}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_clipping_reads_the_loss_along(world: World, stage):
    model = MLP()
    optimizer = fused(model)
    with world.zeroified(model, optimizer, stage=stage):
        loss = squares(model, world.rank)
        loss.backward()
        value = hpczero.read_later(model, loss)
        stepping = waits(optimizer.step)
        world.check(stepping + waits(value) == asked(stage, world), f"{stepping}")
        world.check(stepping > 0 or world.rank == 2)
        world.check(value() == loss.item(), f"{value()} {loss.item()}")


def test_asked_for_before_the_step_it_is_read_at_once(world: World):
    with world.mlp(adamw, stage=3) as (model, _):
        loss = squares(model, world.rank)
        value = hpczero.read_later(model, loss)
        world.check(waits(value) == 1 and value() == loss.item())
        loss.backward()
        clipping = waits(lambda: hpczero.clip_grad_norm_(model, 1.0))
        world.check(clipping == 1 or world.rank == 2)
        world.check(waits(value) == 0 and value() == loss.item())


def test_it_is_the_number_as_it_was(world: World):
    with world.mlp(adamw) as (model, _):
        for made in (torch.tensor([[0.1]]), torch.tensor(0.1, dtype=torch.float64)):
            before = made.item()
            value = hpczero.read_later(model, made)
            made.fill_(7.0)
            world.check(value() == before, f"{value()} {before}")
        half = torch.tensor(0.1, dtype=torch.bfloat16)
        world.check(hpczero.read_later(model, half)() == half.item())


def test_what_is_no_number_is_refused(world: World):
    with world.mlp(adamw) as (model, _):
        for wrong in (torch.zeros(2), torch.zeros(0), torch.tensor(1j)):
            with pytest.raises(ConfigError, match="expected one real element"):
                hpczero.read_later(model, wrong)
    world.check(True)


def test_a_loss_that_is_not_finite_is_read_and_the_step_skipped_on_all_ranks(world: World):
    precision = Precision(nonfinite="skip")
    with world.mlp(adamw, stage=2, precision=precision) as (model, optimizer):
        state = hpczero.sharding(model)
        odd = world.rank == world.size - 1
        loss = squares(model, world.rank) * (math.nan if odd else 1.0)
        loss.backward()
        value = hpczero.read_later(model, loss)
        hpczero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        world.check(state.skipped_steps == 1)
        world.check(math.isnan(value()) if odd else value() == loss.item())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_step_of_a_run_asks_once(world: World, stage, accumulation):
    model = MLP()
    optimizer = fused(model)
    with world.zeroified(model, optimizer, stage=stage):
        step = TrainingStep(
            model,
            optimizer,
            passes=PlainPasses(
                model,
                loss=lambda model, x, y: F.mse_loss(model(x), y),
                accumulation=accumulation,
                accelerator=HostAccelerator(),
            ),
            samples=lambda number, micro: (
                mlp_input(number + micro + world.rank).numpy(),
                torch.ones(4, 3).numpy(),
            ),
            accelerator=HostAccelerator(),
            clip=0.5,
        )
        for number in range(2):  # which make the optimizer's state, and see where it lies
            step.take(number)
        found = waits(lambda: step.take(2))
        world.check(found == asked(stage, world), f"{found}")
