"""A medium that fails on one rank, wherever it does: one error on all ranks, nobody waits, and what was right stays."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest

import hpczero
from hpczero.errors import StepError, TierError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_steps, same_state
from tests.helpers.world import World
from tests.zero.away_steps import broken, on

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

OFFLOAD = on("host")
GRADIENTS_TOO = on("host", parts=2)
TRANSPORTS = ["flat", "hierarchical", "window"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_parameters_that_cannot_be_read_are_one_error(world: World, transport, precision, after):
    ended = []
    for fails in (False, True):
        options = {"offload": OFFLOAD, "transport": transport, "precision": precision}
        with world.mlp(adamw, **options) as (model, optimizer):
            sharding = hpczero.sharding(model)
            mlp_steps(model, optimizer, world.rank)
            if fails:
                last = world.size - 1
                here = world.rank == last

                def train(model: MLP = model) -> None:
                    for _ in range(3):
                        mlp_backward(model, world.rank)

                with broken(sharding, "_read", here=here, when=lambda call, _: call >= after):
                    said = "input/output error" if here else f"tier of rank.s. .{last}."
                    message = world.raises(TierError, said, train)
                assert "unit" in message
                optimizer.zero_grad()
            mlp_backward(model, world.rank)
            optimizer.step()
            ended.append(hpczero.full_state_dict(model))
    world.check_state(*ended)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_that_cannot_be_read_are_one_error_of_the_step(world: World, norm_type):
    with world.mlp(adamw, stage=2, offload=GRADIENTS_TOO) as (model, optimizer):
        sharding = hpczero.sharding(model)
        mlp_backward(model, world.rank)
        before = hpczero.full_state_dict(model)
        with broken(sharding, "_read", here=world.rank == 0):
            mlp_backward(model, world.rank)  # is added to what cannot be read
            norm = hpczero.clip_grad_norm_(model, 1.0, norm_type)
            world.check(norm != norm, "a norm of what could not be read")
        world.raises(TierError, "input/output error", optimizer.step)
        world.raises(TierError, "input/output error", lambda: hpczero.full_gradients(model))
        world.check_state(hpczero.full_state_dict(model), before)
        optimizer.zero_grad()
        mlp_backward(model, world.rank)
        optimizer.step()
        stepped = not same_state(hpczero.full_state_dict(model), before)
        world.check(stepped or world.rank > 0, "no step")


def test_gathering_and_releasing_hold_nothing_where_a_part_cannot_be_read(world: World):
    with world.mlp(adamw, stage=3, offload=OFFLOAD) as (model, optimizer):
        sharding = hpczero.sharding(model)
        before = hpczero.full_state_dict(model)

        def gather() -> None:
            with hpczero.gathered(model):
                pytest.fail("it is not whole")

        with broken(sharding, "_read", here=world.rank == 0, when=lambda call, _: call >= 1):
            world.raises(TierError, "", gather)
            world.raises(TierError, "", lambda: hpczero.release(model, whole=True))
        with hpczero.gathered(model):
            whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
        world.check_state(before, whole)
        mlp_backward(model, world.rank)
        optimizer.step()


def test_values_changed_inside_gathered_that_cannot_be_kept_are_doubted(world: World):
    with world.mlp(adamw, stage=3, offload=OFFLOAD) as (model, _):
        sharding = hpczero.sharding(model)

        def change() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if world.rank == 0:
                    for parameter in model.parameters():
                        parameter.data.mul_(2)
                stack.enter_context(broken(sharding, "_read", here=world.rank == 0))

        with ExitStack() as stack:
            world.raises(TierError, "input/output error", change)
        with pytest.raises(StepError, match="load a checkpoint"):
            mlp_backward(model, world.rank)
