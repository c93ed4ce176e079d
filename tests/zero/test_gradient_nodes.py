"""Parameters whose autograd node is replaced after ``zeroify``: ``parameter.set_``, torch's parametrizations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, mlp_backward, sgd, squares, update
from tests.helpers.world import World

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
def test_inside_gathered_it_trains_as_plain_torch(world: World, stage, transport, act):
    model = MLP()
    plain = copy.deepcopy(model)
    act(plain)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        with hpczero.gathered(model, modifier_rank=0):
            act(model)
        for _ in range(3):
            world.backward(model, plain, squares)
            update(optimizer, reference)
        world.check_weights(model, plain, within=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@ACTS
def test_outside_of_gathered_it_is_refused_by_name(world: World, stage, act):
    with world.mlp(sgd, stage=stage) as (model, _):
        act(model)
        with pytest.raises(StepError, match=r"weight'.*register_parametrization.*inside `with"):
            mlp_backward(model, world.rank)
