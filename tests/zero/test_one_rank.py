"""One rank alone collects its gradient where the mean will lie: no second buffer, and the bits of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.job.mesh import Mesh
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, update, zeroified
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi]

STAGES = (0, 1, 2, 3)
PARTS = 3


def loss_of(model: nn.Module, part: int = 0) -> Tensor:
    """Of one micro batch."""
    found: Tensor = model(mlp_input(part)).square().mean()
    return found


def plain_gradients(take: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Of plain torch, by name."""
    model = MLP()
    take(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_bits(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Collective."""
    found = hpczero.full_gradients(model)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], gradient) for name, gradient in expected.items()
    )


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_have_the_bits_of_plain_torch_step_after_step(world: World, stage):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same gradients each time
    with world.zeroified(model, optimizer, stage=stage):
        for part in range(PARTS):
            loss_of(model, part).backward()
            assert same_bits(model, plain_gradients(lambda plain: loss_of(plain, part).backward()))  # noqa: B023
            update(optimizer)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_is_added_to_the_first(world: World, stage):
    def plainly(plain: nn.Module) -> None:
        loss_of(plain, 0).backward()
        loss_of(plain, 1).backward()

    with world.mlp(adamw, stage=stage) as (model, _):
        state = hpczero.sharding(model)
        plainly(model)
        assert same_bits(model, plain_gradients(plainly))
        model.zero_grad(set_to_none=False)
        loss_of(model, 1).backward()
        assert same_bits(model, plain_gradients(lambda plain: loss_of(plain, 1).backward()))
        assert state.memory.current.get("unsharded", 0) == 0


@pytest.mark.ranks(1)
def test_gradients_that_were_dropped_on_the_way_are_not_in_the_next_ones(world: World):
    with world.mlp(adamw, stage=1) as (model, _):
        state = hpczero.sharding(model)
        with hpczero.no_sync(model):
            loss_of(model, 0).backward()
        model.zero_grad()
        assert state.memory.current.get("gradients", 0) == 0
        with hpczero.no_sync(model):
            loss_of(model, 2).backward()
        next(iter(model.parameters())).grad = None  # of the first slot alone
        loss_of(model, 1).backward()

        def plainly(plain: nn.Module) -> None:
            loss_of(plain, 2).backward()
            next(iter(plain.parameters())).grad = None
            loss_of(plain, 1).backward()

        assert same_bits(model, plain_gradients(plainly))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_gradient_has_none_and_its_neighbours_theirs(world: World, stage):
    model = MLP()
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    optimizer = adamw(model, weight_decay=0.1)
    with world.zeroified(model, optimizer, stage=stage):
        loss_of(model).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        assert state is not None
        assert torch.equal(state["unused"], torch.ones(5)), "it decays only with a gradient"
        assert not torch.equal(state["layers.0.0.weight"], MLP().get_parameter("layers.0.0.weight"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_holds_its_gradient_once(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        state = hpczero.sharding(model)
        state.memory.reset_peak()
        for part in range(PARTS):
            with hpczero.accumulate(model, part, PARTS):
                loss_of(model, part).backward()
        nbytes = 4 * sum(unit.spec.layout.padded_numel for unit in state.units)
        parameters = nbytes if stage == 3 else 0  # no gradient among them
        assert state.memory.peak.get("unsharded", 0) <= parameters
        assert state.memory.peak["gradients"] == nbytes
        optimizer.zero_grad()
        assert state.memory.current["gradients"] == 0


@pytest.mark.ranks(2, 3)
def test_replicas_add_to_each_others_sums(comm):
    """One shard on each rank, and all the same: nothing may be collected in place."""
    topology = hpczero.Topology.create(comm, mesh=Mesh(replicate=comm.size, shard=1))
    model = MLP()
    with zeroified(model, adamw(model), stage=2, topology=topology) as state:
        loss_of(model, comm.rank).backward()
        found = hpczero.full_gradients(model)

        def plainly(plain: nn.Module) -> None:
            for rank in range(comm.size):
                (loss_of(plain, rank) / comm.size).backward()

        expected = plain_gradients(plainly)
        near = all(torch.allclose(found[name], value) for name, value in expected.items())
        parallel_assert(comm, near)
        parallel_assert(comm, state.memory.peak.get("unsharded", 0) > 0)
    topology.free()
