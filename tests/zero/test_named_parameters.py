"""An optimizer over ``model.named_parameters()``: its groups name each piece after the parameter it is of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpczero
from hpczero.checkpoint import load, save
from tests.helpers.small_models import MLP, mlp_backward
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
KINDS = pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])


def _two_groups(kind: Any, model: MLP) -> torch.optim.Optimizer:
    """Weights and biases, which lie across the order of the model."""
    named = list(model.named_parameters())
    parts = [[pair for pair in named if pair[1].dim() == dim] for dim in (2, 1)]
    optimizer: torch.optim.Optimizer = kind([{"params": part} for part in parts], lr=1e-2)
    return optimizer


def _expected(sharding: hpczero.Sharding) -> dict[int, str]:
    return {
        id(shard): unit.spec.layout.slots[position].name
        for unit in sharding.units
        for shard, position in zip(unit.shards, unit.optimized.slots, strict=True)
    }


def _names(optimizer: torch.optim.Optimizer, sharding: hpczero.Sharding) -> bool:
    expected = _expected(sharding)
    return all(
        group["param_names"] == [expected[id(shard)] for shard in group["params"]]
        for group in optimizer.param_groups
    )


@STAGES
@KINDS
def test_pieces_have_the_names_of_their_parameters(world: World, stage, kind):
    model = MLP()
    optimizer = _two_groups(kind, model)
    with world.zeroified(model, optimizer, stage=stage) as sharding:
        world.check(_names(optimizer, sharding), "other names")
        mlp_backward(model, world.rank)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        world.check(_names(optimizer, sharding), "other names after load_state_dict")


@STAGES
def test_names_stay_those_of_this_rank_over_a_checkpoint(world: World, stage, folder):
    for loaded in (False, True):
        model = MLP()
        optimizer = _two_groups(torch.optim.AdamW, model)
        with world.zeroified(model, optimizer, stage=stage) as sharding:
            if loaded:
                load(folder, model)
                world.check(_names(optimizer, sharding), "other names after load")
            mlp_backward(model, world.rank)
            optimizer.step()
            if not loaded:
                save(folder, model, step=1)
