"""A tier of block inputs that fails: one error that names the place, nobody waits, and the next step is right."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import hpczero
from hpczero.errors import TierError
from tests.activations.stacks import Stack, batch, gradients, loss_of, over, plain, same, trained
from tests.helpers.small_models import adamw
from tests.helpers.world import World
from tests.tier.twins import FailingTier

WAYS = ["read", "write", "room"]


@pytest.mark.parametrize("doing", WAYS)
@pytest.mark.parametrize("first", [0, 3])
def test_alone_it_is_an_error_of_backward_and_the_next_one_is_right(tmp_path, doing, first):
    tier = FailingTier(doing=doing, number=errno.ENOSPC, first=first, blocks=4, block_nbytes=4096)
    with over(tier, tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        loss = model(batch())
        for _ in range(2):  # it stays what it is
            with pytest.raises(TierError, match=rf"{doing} at byte [0-9,]+: .*ENOSPC"):
                loss.backward(retain_graph=True)
        del loss
        tier.doing = ""
        assert same(gradients(checkpointing), gradients(plain))


def test_a_read_ahead_that_fails_is_tried_again_by_whoever_needs_it(tmp_path):
    tier = FailingTier(doing="read", first=2, last=3, blocks=4, block_nbytes=4096)
    with over(tier, tmp_path) as checkpointing:
        assert same(gradients(checkpointing, steps=1), gradients(plain, steps=1))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("doing", WAYS)
def test_in_a_sharded_model_it_is_one_error_of_the_step(
    world: World, folder, doing, stage, precision, capfd
):
    last = world.rank == world.size - 1
    tier = FailingTier(number=errno.EIO, blocks=4, block_nbytes=4096)

    def failing(model: Any, optimizer: Any) -> None:
        before = hpczero.full_state_dict(model)
        if last:
            if doing == "room":
                tier._room.take(0, 2**40)  # else the room of the step before is enough
                tier._room._stretches.clear()
            tier.doing = doing
        loss_of(model, 700 + world.rank).backward()  # nobody raises: peers may wait
        message = world.raises(TierError, rf"rank.*|{doing} at byte .*EIO", optimizer.step)
        assert "EIO" in message
        tier.doing = ""
        world.check_state(hpczero.full_state_dict(model), before)

    with over(tier, folder) as checkpointing:
        options = {"stage": stage, "precision": precision}
        found = trained(world, checkpointing, failing=failing, **options)
    world.check_state(found, trained(world, plain, **options))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_once_the_model_is_released_it_is_an_error_of_backward_again(world: World, folder):
    model = Stack(4)
    tier = FailingTier(blocks=4, block_nbytes=4096)
    with over(tier, folder) as checkpointing:
        model.call = checkpointing
        with world.zeroified(model, adamw(model), stage=1):
            checkpointing.join(model)
            model(batch()).backward()
        tier.doing = "read"
        with pytest.raises(TierError, match="read at byte"):
            model(batch()).backward()
