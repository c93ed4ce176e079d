"""What ``hpczero.release`` leaves: an ordinary model of this rank's own, or a named error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero import Offload
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    distance,
    mlp_backward,
    mlp_input,
    raises_on_all,
    sgd,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])


def _trained(comm: MPI.Intracomm, topology: Topology, stage: int, transport: str) -> MLP:
    model = MLP()
    optimizer = sgd(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology, transport=transport)
    mlp_backward(model, comm.rank)
    optimizer.step()
    optimizer.zero_grad()
    return model


@STAGES
@TRANSPORTS
def test_a_released_model_is_each_ranks_own(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = _trained(comm, topology, stage, transport)
    kept = MLP()
    with hpczero.gathered(model):
        kept.load_state_dict(model.state_dict())
    hpczero.release(model, whole=True)
    assert distance(model, kept) == 0.0
    comm.Barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 + comm.rank)
    comm.Barrier()
    found = distance(model, kept)
    parallel_assert(comm, abs(found - 1.0 - comm.rank) < 1e-5, f"changed by {found}")


@STAGES
@TRANSPORTS
def test_a_released_model_is_zeroified_again(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = _trained(comm, topology, stage, transport)
    hpczero.release(model, whole=True)
    plain = copy.deepcopy(model)
    reference, optimizer = sgd(plain), sgd(model)
    hpczero.zeroify(model, optimizer, stage=3, topology=topology, transport=transport)
    losses = [plain(mlp_input(rank)).square().sum() for rank in range(comm.size)]
    torch.stack(losses).mean().backward()
    reference.step()
    mlp_backward(model, comm.rank)
    optimizer.step()
    with hpczero.gathered(model):
        worst = distance(model, plain)
    hpczero.release(model)
    parallel_assert(comm, worst < 1e-6, f"differs by {worst} from one process")


@TRANSPORTS
def test_what_was_sharded_at_the_release_says_so(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    model = _trained(comm, topology, 3, transport)
    state = hpczero.full_state_dict(model)
    hpczero.release(model)
    said = r"sharded when the model was released.*release\(model, whole=True\).*assign=True"
    with pytest.raises(StepError, match=said):
        model(mlp_input(comm.rank))
    with pytest.raises(StepError, match=said):
        hpczero.zeroify(model, sgd(model), stage=3, topology=topology, transport=transport)
    model.load_state_dict(comm.bcast(state), assign=True)
    mlp_backward(model, comm.rank)
    parallel_assert(comm, all(p.grad is not None for p in model.parameters()))


@STAGES
def test_release_inside_gathered_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = _trained(comm, topology, stage, "flat")
    with hpczero.gathered(model):
        raises_on_all(comm, StepError, "inside.*gathered", lambda: hpczero.release(model))
    hpczero.release(model)


@TRANSPORTS
@pytest.mark.parametrize("away", [False, True], ids=["memory", "disk"])
def test_backward_of_a_graph_from_before_a_release_is_a_named_error(
    comm: MPI.Intracomm, topology: Topology, folder: Path, away: bool, transport: str
) -> None:
    model = MLP()
    offload = Offload("disk", "disk", "disk", folder, 2**14, 4) if away else None
    hpczero.zeroify(
        model, adamw(model), stage=3, topology=topology, transport=transport, offload=offload
    )
    loss = model(mlp_input(comm.rank)).sum()
    hpczero.release(model, whole=not away)
    with pytest.raises(StepError, match=r"graph from before hpczero.release"):
        loss.backward()
    comm.Barrier()
