"""One rank alone collects its gradient where the mean will lie: no second buffer, and the bits of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hpczero
from hpczero.job.mesh import Mesh
from tests.helpers.small_models import MLP, adamw, same_state, squares, update
from tests.helpers.world import World, on_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]

STAGES = (0, 1, 2, 3)
PARTS = 3


def same_gradients(model: nn.Module, take: Callable[[nn.Module], object]) -> bool:
    """As ``take`` leaves them in plain torch, in every bit."""
    plain = MLP()
    take(plain)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return same_state(hpczero.full_gradients(model), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_have_the_bits_of_plain_torch_step_after_step(world: World, stage):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same gradients each time
    with world.zeroified(model, optimizer, stage=stage):
        for part in range(PARTS):
            squares(model, part).backward()
            assert same_gradients(model, lambda plain: squares(plain, part).backward())  # noqa: B023
            update(optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_is_added_to_the_first(world: World, stage):
    def plainly(plain: nn.Module) -> None:
        squares(plain, 0).backward()
        squares(plain, 1).backward()

    with world.mlp(adamw, stage=stage) as (model, _):
        state = hpczero.sharding(model)
        plainly(model)
        assert same_gradients(model, plainly)
        model.zero_grad(set_to_none=False)
        squares(model, 1).backward()
        assert same_gradients(model, lambda plain: squares(plain, 1).backward())
        assert state.memory.current.get("unsharded", 0) == 0


def test_gradients_that_were_dropped_on_the_way_are_not_in_the_next_ones(world: World):
    with world.mlp(adamw, stage=1) as (model, _):
        state = hpczero.sharding(model)
        with hpczero.no_sync(model):
            squares(model, 0).backward()
        model.zero_grad()
        assert state.memory.current.get("gradients", 0) == 0
        with hpczero.no_sync(model):
            squares(model, 2).backward()
        next(iter(model.parameters())).grad = None  # of the first slot alone
        squares(model, 1).backward()

        def plainly(plain: nn.Module) -> None:
            squares(plain, 2).backward()
            next(iter(plain.parameters())).grad = None
            squares(plain, 1).backward()

        assert same_gradients(model, plainly)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_gradient_has_none_and_its_neighbours_theirs(world: World, stage):
    model = MLP()
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    optimizer = adamw(model, weight_decay=0.1)
    with world.zeroified(model, optimizer, stage=stage):
        squares(model, 0).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        assert state is not None
        assert torch.equal(state["unused"], torch.ones(5)), "it decays only with a gradient"
        assert not torch.equal(state["layers.0.0.weight"], MLP().get_parameter("layers.0.0.weight"))


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_holds_its_gradient_once(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        state = hpczero.sharding(model)
        state.memory.reset_peak()
        for part in range(PARTS):
            with hpczero.accumulate(model, part, PARTS):
                squares(model, part).backward()
        nbytes = 4 * sum(unit.spec.layout.padded_numel for unit in state.units)
        parameters = nbytes if stage == 3 else 0  # no gradient among them
        assert state.memory.peak.get("unsharded", 0) <= parameters
        assert state.memory.peak["gradients"] == nbytes
        optimizer.zero_grad()
        assert state.memory.current["gradients"] == 0


@pytest.mark.ranks(2, 3)
def test_replicas_add_to_each_others_sums(comm):
    """One shard on each rank, and all the same: nothing may be collected in place."""
    model, plain = MLP(), MLP()
    with (
        on_nodes(comm, None, mesh=Mesh(replicate=comm.size, shard=1)) as world,
        world.zeroified(model, adamw(model), stage=2) as state,
    ):
        world.backward(model, plain, squares)
        world.check_gradients(model, plain)
        world.check(state.memory.peak.get("unsharded", 0) > 0)
