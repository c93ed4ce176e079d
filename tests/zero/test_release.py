"""What ``hpczero.release`` leaves: an ordinary model of this rank's own, or a named error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hpczero
from hpczero import Offload
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, distance, mlp_steps, sgd, squares, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])


def _trained(world: World, stage: int, transport: str) -> MLP:
    model = MLP()
    optimizer = sgd(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=world.topology, transport=transport)
    mlp_steps(model, optimizer, world.rank)
    return model


@STAGES
@TRANSPORTS
def test_a_released_model_is_each_ranks_own(world: World, stage, transport):
    model = _trained(world, stage, transport)
    kept = MLP()
    with hpczero.gathered(model):
        kept.load_state_dict(model.state_dict())
    hpczero.release(model, whole=True)
    assert distance(model, kept) == 0.0
    world.comm.Barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 + world.rank)
    world.comm.Barrier()
    found = distance(model, kept)
    world.check(abs(found - 1.0 - world.rank) < 1e-5, f"changed by {found}")


@STAGES
@TRANSPORTS
def test_a_released_model_is_zeroified_again(world: World, stage, transport):
    model = _trained(world, stage, transport)
    hpczero.release(model, whole=True)
    plain = copy.deepcopy(model)
    reference, optimizer = sgd(plain), sgd(model)
    hpczero.zeroify(model, optimizer, stage=3, topology=world.topology, transport=transport)
    world.backward(model, plain, squares)
    update(optimizer, reference)
    world.check_weights(model, plain, within=1e-6)
    hpczero.release(model)


@TRANSPORTS
def test_what_was_sharded_at_the_release_says_so(world: World, transport):
    model = _trained(world, 3, transport)
    state = hpczero.full_state_dict(model)
    hpczero.release(model)
    said = r"sharded when the model was released.*release\(model, whole=True\).*assign=True"
    with pytest.raises(StepError, match=said):
        squares(model, world.rank)
    with pytest.raises(StepError, match=said):
        hpczero.zeroify(model, sgd(model), stage=3, topology=world.topology, transport=transport)
    model.load_state_dict(world.comm.bcast(state), assign=True)
    squares(model, world.rank).backward()
    world.check(all(p.grad is not None for p in model.parameters()))


@STAGES
def test_release_inside_gathered_is_refused(world: World, stage):
    model = _trained(world, stage, "flat")
    with hpczero.gathered(model):
        world.raises(StepError, "inside.*gathered", lambda: hpczero.release(model))
    hpczero.release(model)


@TRANSPORTS
@pytest.mark.parametrize("away", [False, True], ids=["memory", "disk"])
def test_backward_of_a_graph_from_before_a_release(world: World, folder, away, transport):
    model = MLP()
    options: dict[str, Any] = {"topology": world.topology, "transport": transport}
    if away:
        options["offload"] = Offload("disk", "disk", "disk", folder, 2**14, 4)
    hpczero.zeroify(model, adamw(model), **options)
    loss = squares(model, world.rank)
    hpczero.release(model, whole=not away)
    with pytest.raises(StepError, match=r"graph from before hpczero.release"):
        loss.backward()
    world.comm.Barrier()
