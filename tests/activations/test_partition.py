"""Inputs that are equal on all ranks of a group, of which each rank keeps a part (Pa)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpczero.activations import Checkpointing
from hpczero.activations.store import Partitioned
from hpczero.errors import PlanError, StepError, TierError
from tests.activations.stacks import (
    BATCH,
    INPUT_NBYTES,
    PLACES,
    WIDTH,
    Stack,
    batch,
    gradients,
    on_disk,
    over,
    plain,
    same,
    torchs,
    trained,
)
from tests.helpers.small_models import grad
from tests.helpers.world import World
from tests.tier.twins import FailingTier

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
LAYERS, STEPS = 6, 3


def test_each_rank_keeps_a_part_of_each_input_and_the_bits_are_the_same(world: World):
    with Checkpointing.create(group=world.topology.shard) as checkpointing:
        found = gradients(checkpointing, STEPS, LAYERS)
        assert isinstance(checkpointing._rest, Partitioned)
        stats = checkpointing._rest._collectives.stats
        world.check(checkpointing.kept_nbytes == 0)
        share = INPUT_NBYTES // world.size
        peak = checkpointing.kept_peak_nbytes
        world.check(peak == LAYERS * share, f"{peak}, expected {LAYERS * share}")
        gathers, sent = stats.calls["all_gather"], stats.sent_nbytes["all_gather"]
        world.check(gathers == STEPS * LAYERS, f"{gathers} all-gathers")
        expected = STEPS * LAYERS * share * (world.size - 1)
        world.check(sent == expected, f"{sent} bytes sent, expected {expected}")
    world.check(same(found, gradients(plain, STEPS, LAYERS)))
    world.check(same(found, gradients(torchs, STEPS, LAYERS)))


@pytest.mark.parametrize("place", PLACES)
def test_parts_rest_on_a_tier(world: World, folder, place):
    with place(folder, group=world.topology.shard) as checkpointing:
        found = gradients(checkpointing, STEPS, LAYERS)
        share = INPUT_NBYTES // world.size
        flow = checkpointing.traffic
        moved = STEPS * (LAYERS - 1) * share
        world.check(flow.read_nbytes == flow.written_nbytes == moved, flow)
        world.check(checkpointing.kept_peak_nbytes == share)
        world.check(f"{world.size} ranks" in checkpointing.describe())
    world.check(same(found, gradients(plain, STEPS, LAYERS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sizes_that_ranks_do_not_divide_and_strange_strides(world: World, dtype):
    found = []
    with Checkpointing.create(group=world.topology.shard) as checkpointing:
        for call in (checkpointing, torchs):
            x = batch(rows=97)[:, :47].to(dtype).requires_grad_()
            y = call(torch.sin, (x * 2)[1:])
            y = call(torch.tanh, y.t())
            y = call(torch.cos, (y * 3)[:, ::2])
            y.sum().backward()
            found.append([x.grad if x.grad is not None else x])
    world.check(same(*found))


def one_bit(rank: int) -> Tensor:
    x = torch.zeros(BATCH, WIDTH)
    x[-1, -1] = -0.0 if rank == 1 else 0.0
    return x


DIFFERENT: dict[str, Callable[[int], Tensor]] = {
    "values": batch,
    "shape": lambda rank: batch(rows=BATCH + (rank == 1)),
    "order": lambda rank: batch().roll(int(rank == 1), 0),  # the same numbers in other places
    "one bit": one_bit,
}


def test_inputs_that_differ_are_refused_on_all_ranks(world: World):
    with Checkpointing.create(group=world.topology.shard) as checkpointing:
        for make in DIFFERENT.values():
            x = make(world.rank).requires_grad_().clone()
            use = partial(checkpointing, torch.sin, x)
            message = world.raises(StepError, "not the same on all ranks", use)
            world.check("rank(s) [1" in message, message)
        # and goes on
        world.check(same(gradients(checkpointing, 1), gradients(plain, 1)))


@pytest.mark.parametrize("place", [None, on_disk])
def test_equal_inputs_may_begin_elsewhere_on_each_rank(world: World, folder, place):
    room = torch.empty(BATCH * WIDTH + 64)
    begin = (-room.data_ptr() % 64) // 4 + world.rank  # as memory of numpy may
    x = room[begin:][: BATCH * WIDTH].view(BATCH, WIDTH)
    x.copy_(batch())
    make = place or (lambda _, **options: Checkpointing.create(**options))
    found = []
    with make(folder, group=world.topology.shard) as checkpointing:
        for call in (checkpointing, plain):
            gain = torch.ones(WIDTH, requires_grad=True)
            y = call(lambda x, gain: torch.sin(x * gain), x, gain)
            call(torch.sin, x * gain)  # newer
            y.sum().backward()
            found.append([grad(gain)])
    world.check(same(*found))


@pytest.mark.parametrize("doing", ["read", "write", "room"])
def test_a_part_that_cannot_be_brought_back_is_one_error_on_all_ranks(world: World, folder, doing):
    tier = FailingTier(number=errno.EIO, blocks=4, block_nbytes=4096)
    with over(tier, folder, group=world.topology.shard) as checkpointing:
        model = Stack(call=checkpointing)
        tier.doing = doing if world.rank == 1 else ""
        loss = model(batch())
        world.raises(TierError, rf"{doing} at byte.*EIO", loss.backward)
        del loss
        tier.doing = ""
        world.check(same(gradients(checkpointing, 1), gradients(plain, 1)))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("place", [None, on_disk])
@pytest.mark.parametrize("fails", [False, True])
def test_in_a_sharded_model(world: World, folder, stage, place, fails):
    def lost(into: Tensor, offset: int) -> None:
        raise TierError(f"byte {offset}: input/output error")

    def failing(model: nn.Module, optimizer: Any) -> None:
        rest: Any = checkpointing._rest
        broken = rest.inner.tier
        if world.rank == 0:
            broken._read = lost
        model(batch()).backward()
        world.raises(TierError, "input/output error", optimizer.step)
        broken.__dict__.pop("_read", None)

    make = Checkpointing.create if place is None else partial(place, folder)
    how: Any = {"stage": stage, "alike": True}
    with make(group=world.topology.shard) as checkpointing:
        fail = failing if fails and place is not None else None
        found = trained(world, checkpointing, failing=fail, **how)
    world.check_state(found, trained(world, plain, **how))


@pytest.mark.ranks(1)
def test_a_group_of_one_is_refused(world: World):
    with pytest.raises(PlanError, match=r"group of one rank.*nothing would be saved"):
        Checkpointing.create(group=world.topology.shard)


@pytest.mark.limit(60)
@pytest.mark.parametrize(("rows", "dtype"), [(10, None), (41, None), (0, None), (40, torch.long)])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_would_not_keep_the_same_arguments_are_told(world: World, rows, dtype, rank):
    """Instead of waiting. Of 64 floats a row: what has less than 4096 bytes stays."""
    other = world.rank == rank
    mine = torch.ones(rows if other else 40, 64, dtype=dtype if other else None)
    with Checkpointing.create(group=world.topology.shard) as checkpointing:
        said = "arguments of a checkpointed block are not the same on all ranks"
        world.raises(StepError, said, lambda: checkpointing(torch.sin, mine))
