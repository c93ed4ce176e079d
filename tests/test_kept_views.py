"""What is kept of a parameter after ``gathered`` stays what it was there, whatever it is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from tests.helpers.parallel import parallel_assert
from tests.small_models import MLP, adamw, check_trains, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])

NAME = "layers.1.0.weight"
KEPT: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda model: model.get_parameter(NAME).detach(),
    "data": lambda model: model.get_parameter(NAME).data,
    "view": lambda model: model.get_parameter(NAME).detach().view(-1)[3:].view(2, -1),
    "numpy": lambda model: model.get_parameter(NAME).detach().numpy(),
    "state_dict": lambda model: model.state_dict()[NAME],
    "state_dict of a unit": lambda model: model.get_submodule("layers.1").state_dict()["0.weight"],
    "state_dict inside one": lambda model: model.get_submodule("layers.1.0").state_dict()["weight"],
}


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_is_kept_can_be_read_afterwards(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    keep: Callable[[nn.Module], Any],
) -> None:
    model = MLP()
    expected = torch.as_tensor(keep(MLP())).clone()
    options: dict[str, Any] = {"stage": stage, "transport": transport, "topology": topology}
    optimizer = adamw(model)
    with zeroified(model, optimizer, **options) as sharding:
        with hpczero.gathered(model):
            kept = keep(model)
        parallel_assert(comm, torch.equal(torch.as_tensor(kept), expected))
        parallel_assert(comm, sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
        check_trains(comm, model, optimizer)
        if stage == 3:  # below, parameters stay where they are, as in plain torch
            parallel_assert(comm, torch.equal(torch.as_tensor(kept), expected), "it changed")


@pytest.mark.parametrize("transport", ["flat", "hierarchical"])  # window: memory of all ranks
def test_array_kept_of_a_forward_does_not_hold_the_unit(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    model, arrays = MLP(), []
    optimizer = adamw(model)
    handle = model.layers[1].register_forward_hook(
        lambda module, args, output: arrays.append(module[0].weight.detach().numpy())
    )
    with zeroified(model, optimizer, stage=3, topology=topology, transport=transport) as sharding:
        model(mlp_input(comm.rank)).sum().backward()
        handle.remove()
        parallel_assert(comm, sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
        expected = MLP().get_parameter(NAME).detach()
        parallel_assert(comm, torch.equal(torch.as_tensor(arrays[0]), expected))
        check_trains(comm, model, optimizer)


@STAGES
@TRANSPORTS
def test_state_dict_shows_the_parameters_themselves(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    # as in plain torch, where writing into it is a way to set parameters
    model = MLP()
    options: dict[str, Any] = {"stage": stage, "transport": transport, "topology": topology}
    with zeroified(model, adamw(model), **options):
        with hpczero.gathered(model, modifier_rank=0):
            model.state_dict()[NAME].fill_(0.25)
        state = hpczero.full_state_dict(model)
        parallel_assert(comm, state is None or bool((state[NAME] == 0.25).all()))


@TRANSPORTS
def test_graph_that_was_begun_before_or_inside_gathered(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    def gradients(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))

    x, plain = mlp_input(0), MLP()
    expected = gradients(plain, [plain(x).square().sum(), plain(2 * x).square().sum()])
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, transport=transport):
        before = model(x).square().sum()
        with hpczero.gathered(model):
            inside = model(2 * x).square().sum()
        (before + inside).backward()
        found = hpczero.full_gradients(model)
        pairs = zip(found.values(), expected, strict=True)
        parallel_assert(comm, all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs))
        check_trains(comm, model, optimizer)
