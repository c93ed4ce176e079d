"""Checkpointed blocks of a zeroified model whose inputs rest elsewhere: the bits of plain torch at every stage."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.activations import Checkpointing, keep_products
from hpczero.errors import PlanError
from tests.activations.stacks import (
    INPUT_NBYTES,
    LAYERS,
    PLACES,
    STEPS,
    Block,
    Stack,
    loss_of,
    on_disk,
    plain,
    torchs,
    trained,
)
from tests.helpers.small_models import adamw, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


def by_torch(size: int) -> dict[str, Tensor]:
    """The same by plain torch in one process: the mean over ranks, by hand."""
    model = Stack(LAYERS)
    optimizer = adamw(model)
    for step in range(STEPS):
        sums: list[Tensor] = []
        for rank in range(size):
            model.zero_grad()
            loss_of(model, 1000 * step + rank).backward()
            mine = [p.grad for p in model.parameters() if p.grad is not None]
            sums = [a + b for a, b in zip(sums, mine, strict=True)] if sums else mine
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total * (1.0 / size)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_are_those_without_checkpointing_and_of_torch(world: World, folder, stage, place):
    with place(folder) as checkpointing:
        found = trained(world, checkpointing, stage=stage)
        moved = STEPS * (LAYERS - 1) * INPUT_NBYTES
        flow = checkpointing.traffic
        counts = flow.read_nbytes, flow.written_nbytes
        world.check(counts == (moved, moved), f"{counts}, expected {moved}")
        world.check(checkpointing.kept_peak_nbytes == INPUT_NBYTES)
    world.check_state(found, trained(world, plain, stage=stage))
    world.check_state(found, trained(world, torchs, stage=stage))
    # The norm is summed over shards, in another order than torch's own: the clipping factor may round in another way.
    expected = by_torch(world.size)
    near = (torch.allclose(value, expected[n], atol=1e-5) for n, value in (found or {}).items())
    world.check(all(near), "differs from plain torch")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("parameters", ["device", "disk"])
def test_parameters_and_state_on_a_tier_too(world: World, folder, parameters, transport, precision):
    offload = Offload("disk", "disk", parameters, folder, 2**14, buffers=4)
    options = {"stage": 3, "transport": transport, "precision": precision}
    with on_disk(folder, window=8192) as checkpointing:
        found = trained(world, checkpointing, 2, offload=offload, **options)
    world.check_state(found, trained(world, plain, 2, **options))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat", "hierarchical"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("policy", [keep_products, [torch.ops.aten.tanh.default]])
def test_selective_recomputation(world: World, folder, policy, stage, transport, precision):
    options = {"stage": stage, "transport": transport, "precision": precision}
    expected = trained(world, plain, 2, **options)
    for make in (Checkpointing.create, partial(on_disk, folder)):
        with make(policy=policy) as checkpointing:
            world.check_state(trained(world, checkpointing, 2, **options), expected)


class Turned(Block):
    """Takes slices, as a hook does that gathers parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[:, 5:], x[:, :5]], 1))


@pytest.mark.parametrize("parameters", ["device", "disk"])
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "auto"])
def test_a_policy_sees_no_operation_of_a_hook(world: World, folder, transport, parameters):
    """Operations are matched by their number: one more in forward would give each the result of another."""
    offload = Offload(parameters, parameters, parameters, folder, 2**14, buffers=4)
    found = []
    for call in (Checkpointing.create(policy=[torch.ops.aten.slice.Tensor]), plain):
        model = Stack(LAYERS)
        model.blocks = nn.ModuleList(Turned() for _ in range(LAYERS))
        model.call = call
        options = {"transport": transport, "offload": offload}
        with world.zeroified(model, adamw(model), **options) as sharding:
            for step in range(2):
                loss_of(model, 1000 * step + world.rank).backward()
                update(*sharding.optimizers)
            found.append(hpczero.full_state_dict(model))
    world.check_state(*found)


def test_ranks_that_keep_inputs_in_different_ways_are_refused(world: World, folder):
    model = Stack(LAYERS)
    other = world.rank == world.size - 1 and world.size > 1
    with (
        world.zeroified(model, adamw(model)),
        Checkpointing.create() if other else on_disk(folder) as checkpointing,
    ):
        if world.size > 1:
            world.raises(PlanError, "same options", lambda: checkpointing.join(model))
        else:
            checkpointing.join(model)
    with pytest.raises(PlanError, match="not zeroified"):
        checkpointing.join(model)
