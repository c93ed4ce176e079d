"""A medium that fails on one rank, wherever it does: one error on all ranks, nobody waits, and what was right stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import hpczero
from hpczero import Offload
from hpczero.errors import StepError, TierError
from hpczero.tier import StagedTier
from hpczero.zero.sharding import Sharding
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_steps, same_state
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

OFFLOAD = Offload("host", "host", "host", window=2**14, buffers=4)
GRADIENTS_TOO = Offload("host", "host", window=2**14, buffers=4)
TRANSPORTS = ["flat", "hierarchical", "window"]


@contextmanager
def unreadable(sharding: Sharding, *, here: bool, after: int = 0) -> Iterator[None]:
    """Reads of this rank's tier fail inside, where ``here``, but for the first ``after``."""
    store = sharding.away.store
    assert store is not None
    tier = store.tier
    assert isinstance(tier, StagedTier)
    read: Callable[[torch.Tensor, int], None] = tier._read
    done = 0

    def broken(into: torch.Tensor, offset: int) -> None:
        nonlocal done
        done += 1
        if done > after:
            raise TierError(f"offset {offset}: input/output error")
        read(into, offset)

    if here:
        tier._read = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        if here:
            del tier._read


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_parameters_that_cannot_be_read_are_one_error(world: World, transport, precision, after):
    ended = []
    for broken in (False, True):
        options = {"offload": OFFLOAD, "transport": transport, "precision": precision}
        with world.mlp(adamw, **options) as (model, optimizer):
            sharding = hpczero.sharding(model)
            mlp_steps(model, optimizer, world.rank)
            if broken:
                last = world.size - 1

                def train(model: MLP = model) -> None:
                    for _ in range(3):
                        mlp_backward(model, world.rank)

                with unreadable(sharding, here=world.rank == last, after=after):
                    here = world.rank == last
                    said = "input/output error" if here else f"tier of rank.s. .{last}."
                    message = world.raises(TierError, said, train)
                assert "unit" in message
                optimizer.zero_grad()
            mlp_backward(model, world.rank)
            optimizer.step()
            ended.append(hpczero.full_state_dict(model))
    world.check_state(*ended)


def test_gradients_that_cannot_be_read_are_one_error_of_the_step(world: World):
    with world.mlp(adamw, stage=2, offload=GRADIENTS_TOO) as (model, optimizer):
        sharding = hpczero.sharding(model)
        mlp_backward(model, world.rank)
        before = hpczero.full_state_dict(model)
        with unreadable(sharding, here=world.rank == 0):
            mlp_backward(model, world.rank)  # is added to what cannot be read
            norm = hpczero.clip_grad_norm_(model, 1.0)
            world.check(norm != norm, "a norm of what could not be read")
        world.raises(TierError, "input/output error", optimizer.step)
        world.raises(TierError, "input/output error", lambda: hpczero.full_gradients(model))
        world.check_state(hpczero.full_state_dict(model), before)
        optimizer.zero_grad()
        mlp_backward(model, world.rank)
        optimizer.step()
        stepped = not same_state(hpczero.full_state_dict(model), before)
        world.check(stepped or world.rank > 0, "no step")


def test_norms_of_gradients_that_cannot_be_read_are_one_error_of_the_step(world: World):
    with world.mlp(adamw, stage=2, offload=GRADIENTS_TOO) as (model, optimizer):
        sharding = hpczero.sharding(model)
        mlp_backward(model, world.rank)
        with unreadable(sharding, here=world.rank == 0):
            hpczero.clip_grad_norm_(model, 1.0, float("inf"))
        world.raises(TierError, "input/output error", optimizer.step)


def test_gathering_and_releasing_hold_nothing_where_a_part_cannot_be_read(world: World):
    with world.mlp(adamw, stage=3, offload=OFFLOAD) as (model, optimizer):
        sharding = hpczero.sharding(model)
        before = hpczero.full_state_dict(model)

        def gather() -> None:
            with hpczero.gathered(model):
                pytest.fail("it is not whole")

        with unreadable(sharding, here=world.rank == 0, after=1):
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
                broken.__enter__()

        broken = unreadable(sharding, here=world.rank == 0)
        try:
            world.raises(TierError, "input/output error", change)
        finally:
            broken.__exit__(None, None, None)
        with pytest.raises(StepError, match="load a checkpoint"):
            mlp_backward(model, world.rank)
