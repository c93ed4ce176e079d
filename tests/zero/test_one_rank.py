"""One rank alone collects its gradient where the mean will lie: no second buffer, and the bits of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.job.mesh import Mesh
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi]

STAGES = (0, 1, 2, 3)
PARTS = 3


def loss_of(model: nn.Module, part: int = 0) -> Tensor:
    """Of one micro batch."""
    found: Tensor = model(mlp_input(part)).square().mean()
    return found


def backward(model: nn.Module, part: int = 0) -> None:
    """Of one micro batch."""
    loss_of(model, part).backward()


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
def test_gradients_have_the_bits_of_plain_torch_step_after_step(
    topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same gradients each time
    with zeroified(model, optimizer, stage=stage, topology=topology):
        for part in range(PARTS):
            loss_of(model, part).backward()
            assert same_bits(model, plain_gradients(partial(backward, part=part)))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_are_summed_and_multiplied_once(topology: Topology, stage: int) -> None:
    def plainly(plain: nn.Module) -> None:
        for part in range(PARTS):
            loss_of(plain, part).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / PARTS)

    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as state:
        state.memory.reset_peak()
        for part in range(PARTS):
            with hpczero.accumulate(model, part, PARTS):
                loss_of(model, part).backward()
        assert same_bits(model, plain_gradients(plainly))
        assert state.memory.peak.get("unsharded", 0) <= whole_nbytes(state, stage)


def whole_nbytes(state: hpczero.Sharding, stage: int) -> int:
    """Of whole parameters that stage 3 unshards; no gradient among them."""
    return sum(4 * unit.spec.layout.padded_numel for unit in state.units) if stage == 3 else 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_is_added_to_the_first(topology: Topology, stage: int) -> None:
    def plainly(plain: nn.Module) -> None:
        loss_of(plain, 0).backward()
        loss_of(plain, 1).backward()

    model = MLP()
    with zeroified(model, adamw(model), stage=stage, topology=topology) as state:
        plainly(model)
        assert same_bits(model, plain_gradients(plainly))
        model.zero_grad(set_to_none=False)
        loss_of(model, 1).backward()
        assert same_bits(model, plain_gradients(lambda plain: loss_of(plain, 1).backward()))
        assert state.memory.current.get("unsharded", 0) == 0


@pytest.mark.ranks(1)
def test_gradients_that_were_dropped_on_the_way_are_not_in_the_next_ones(
    topology: Topology,
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=1, topology=topology) as state:
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
def test_a_parameter_without_a_gradient_has_none_and_its_neighbours_theirs(
    topology: Topology, stage: int
) -> None:
    model = MLP()
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    optimizer = adamw(model, weight_decay=0.1)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        loss_of(model).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        assert state is not None
        assert torch.equal(state["unused"], torch.ones(5)), "it decays only with a gradient"
        assert not torch.equal(state["layers.0.0.weight"], MLP().get_parameter("layers.0.0.weight"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_holds_its_gradient_once(topology: Topology, stage: int) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as state:
        state.memory.reset_peak()
        loss_of(model).backward()
        numel = sum(unit.spec.layout.padded_numel for unit in state.units)
        assert state.memory.peak.get("unsharded", 0) == 0
        assert state.memory.peak["gradients"] == 4 * numel
        optimizer.zero_grad()
        assert state.memory.current["gradients"] == 0


@pytest.mark.ranks(2, 3)
def test_replicas_add_to_each_others_sums(comm: MPI.Intracomm) -> None:
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
