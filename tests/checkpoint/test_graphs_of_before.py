"""New values between a forward and its backward: the graph of the values of before is refused, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Offload
from tests.helpers.small_models import adamw
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]
SAID = "modified by an inplace operation"


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(3, 8)).square().mean()
    return loss


@pytest.mark.parametrize("away", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", ["load", "import"])
def test_backward_of_a_graph_from_before_is_torchs_error_on_all_ranks(
    world: World, way: str, stage: int, away: bool
) -> None:
    plain = made()
    loss = loss_of(plain)
    plain.load_state_dict(made().state_dict())
    with pytest.raises(RuntimeError, match=SAID):
        loss.backward()

    model: Any = made()
    optimizer = adamw(model)
    where: Any = "disk" if stage == 3 else "device"
    offload = Offload("disk", "disk", where, world.folder, 2**14, 4) if away and stage else None
    with world.zeroified(model, optimizer, stage=stage, offload=offload):
        weights = world.folder / "weights.pt"
        if way == "load":
            hpczero.checkpoint.save(world.folder / "saved", model, optimizer, step=1)
        elif world.rank == 0:
            torch.save(made().state_dict(), weights)
        world.comm.Barrier()
        loss = loss_of(model)
        if way == "load":
            hpczero.checkpoint.load(world.folder / "saved", model, optimizer)
        else:
            hpczero.checkpoint.import_weights(weights, model)
        world.raises(RuntimeError, SAID, loss.backward)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        world.check(bool(torch.isfinite(loss_of(model))))
