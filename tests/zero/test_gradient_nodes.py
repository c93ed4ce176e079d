"""Parameters whose autograd node is replaced after ``zeroify``: ``parameter.set_``, torch's parametrizations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import (
    MLP,
    check_weights,
    mlp_backward,
    mlp_input,
    sgd,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


def _linear(model: MLP) -> nn.Linear:
    found = model.get_submodule("layers.1.0")
    assert isinstance(found, nn.Linear)
    return found


def _parametrize(model: MLP) -> None:
    register_parametrization(_linear(model), "weight", Halved())


def _set(model: MLP) -> None:
    with torch.no_grad():
        weight = _linear(model).weight
        weight.set_(weight)  # type: ignore[call-overload]


ACTS = pytest.mark.parametrize("act", [_parametrize, _set], ids=lambda act: act.__name__)


@STAGES
@TRANSPORTS
@ACTS
def test_inside_gathered_it_trains_as_plain_torch(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    act: Callable[[MLP], None],
) -> None:
    model = MLP()
    plain = copy.deepcopy(model)
    act(plain)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        with hpczero.gathered(model, modifier_rank=0):
            act(model)
        for _ in range(3):
            losses = [plain(mlp_input(rank)).square().sum() for rank in range(comm.size)]
            torch.stack(losses).mean().backward()
            reference.step()
            reference.zero_grad()
            mlp_backward(model, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
        check_weights(comm, model, plain, within=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@ACTS
def test_outside_of_gathered_it_is_refused_by_name(
    comm: MPI.Intracomm, topology: Topology, stage: int, act: Callable[[MLP], None]
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        act(model)
        with pytest.raises(StepError, match=r"weight'.*register_parametrization.*inside `with"):
            mlp_backward(model, comm.rank)
