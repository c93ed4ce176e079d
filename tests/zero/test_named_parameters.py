"""An optimizer over ``model.named_parameters()``: its groups name each piece after the parameter it is of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.checkpoint import load, save
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, mlp_backward, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

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
def test_pieces_have_the_names_of_their_parameters(
    comm: MPI.Intracomm, topology: Topology, stage: int, kind: Any
) -> None:
    model = MLP()
    optimizer = _two_groups(kind, model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        parallel_assert(comm, _names(optimizer, sharding), "other names")
        mlp_backward(model, comm.rank)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        parallel_assert(comm, _names(optimizer, sharding), "other names after load_state_dict")


@STAGES
def test_names_stay_those_of_this_rank_over_a_checkpoint(
    comm: MPI.Intracomm, topology: Topology, stage: int, folder: Path
) -> None:
    for loaded in (False, True):
        model = MLP()
        optimizer = _two_groups(torch.optim.AdamW, model)
        with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
            if loaded:
                load(folder, model)
                parallel_assert(comm, _names(optimizer, sharding), "other names after load")
            mlp_backward(model, comm.rank)
            optimizer.step()
            if not loaded:
                save(folder, model, step=1)
