"""Ranks that freeze, unfreeze or add groups otherwise than others, and what cannot be unfrozen: named, on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    check_trains,
    mlp_backward,
    raises_on_all,
    same,
    values,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
@pytest.mark.parametrize("trainable", [True, False])
def test_freezing_or_unfreezing_on_one_rank(
    comm: MPI.Intracomm, topology: Topology, stage: int, trainable: bool
) -> None:
    model = MLP()
    model.layers[1].requires_grad_(not trainable)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        if comm.rank == 1:
            model.layers[1].requires_grad_(trainable)
        mlp_backward(model, comm.rank)
        what = "an unfrozen parameter 'layers.1.0.weight'"
        what = what if trainable else r"2 frozen parameter\(s\), first 'layers.1.0.weight'"
        raises_on_all(comm, StepError, f"has .*{what}.*, where rank 0 has nothing", optimizer.step)
        parallel_assert(comm, same(values(sharding), before))
        model.layers[1].requires_grad_(not trainable)
        if not trainable:
            check_trains(comm, model, optimizer)


@STAGES
def test_a_group_added_on_one_rank(comm: MPI.Intracomm, topology: Topology, stage: int) -> None:
    model = MLP()
    layer = model.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        layer.requires_grad_(True)
        if comm.rank == 1:
            optimizer.add_param_group({"params": list(layer.parameters())})
        mlp_backward(model, comm.rank)
        said = "has .*an added group 1 of the optimizer.*, where rank 0 has"
        raises_on_all(comm, StepError, said, optimizer.step)


@STAGES
def test_unfrozen_and_in_no_group(comm: MPI.Intracomm, topology: Topology, stage: int) -> None:
    model = MLP()
    layer = model.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        layer.requires_grad_(True)
        mlp_backward(model, comm.rank)
        said = r"2 parameter\(s\) are unfrozen and in no optimizer group, first 'layers.1.0.weight'"
        raises_on_all(comm, StepError, said, optimizer.step)
        optimizer.add_param_group({"params": list(layer.parameters())})
        optimizer.step()  # as in torch, with the gradients that are there


@STAGES
def test_a_parameter_added_to_a_second_group(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    layer = model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters())})
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "is in another group already", optimizer.step)


@pytest.mark.parametrize("transport", ["flat", "window", "hierarchical"])
def test_nothing_hangs_where_one_rank_unfreezes_alone(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, transport=transport):
        if comm.rank == 0:
            model.layers[1].requires_grad_(True)
        for _ in range(2):
            mlp_backward(model, comm.rank)
            hpczero.clip_grad_norm_(model, 1.0)
            raises_on_all(comm, StepError, "an unfrozen parameter|has nothing", optimizer.step)
            optimizer.zero_grad()
        raises_on_all(
            comm,
            StepError,
            "an unfrozen parameter|has nothing",
            lambda: hpczero.checkpoint.save("never", model, optimizer, step=1),
        )
        model.layers[1].requires_grad_(True)
        mlp_backward(model, comm.rank)
        optimizer.step()


def _part(model: nn.Module) -> None:
    model.get_parameter("layers.1.0.bias").requires_grad_(True)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "codes": ("rests as int8: its values are codes", {"quantize": "int8"}),
    "delayed": (
        "with a delayed update",
        {"offload": hpczero.Offload("host", "host", step="host", delayed=True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_unfrozen(comm: MPI.Intracomm, topology: Topology, case: str) -> None:
    said, options = CASES[case]
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, **options):
        weight = model.get_parameter("layers.1.0.weight").requires_grad_(True)
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, said, optimizer.step)
        weight.requires_grad_(False)
        optimizer.zero_grad()
        mlp_backward(model, comm.rank)
        optimizer.step()


def test_a_part_of_a_unit(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology):
        _part(model)
        mlp_backward(model, comm.rank)
        said = "'layers.1.0.bias' was unfrozen after zeroify, and 'layers.1.0.weight', of the same"
        raises_on_all(comm, StepError, said, optimizer.step)
        model.layers[1].requires_grad_(True)
        optimizer.step()


@STAGES
def test_a_change_that_an_exception_has_left_half_done(
    comm: MPI.Intracomm, topology: Topology, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP()
    layer = model.layers[1].requires_grad_(False)
    optimizer = adamw(model)  # the layer is in its group: torch trains it once it is unfrozen
    with zeroified(model, optimizer, stage=stage, topology=topology):
        layer.requires_grad_(True)
        with monkeypatch.context() as patch:
            patch.setattr("hpczero.zero.attachment.point_at_shards", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                mlp_backward(model, comm.rank)
        optimizer.zero_grad()
        mlp_backward(model, comm.rank)
        said = "an exception cut off the change of what trains"
        raises_on_all(comm, StepError, said, optimizer.step)
        raises_on_all(
            comm,
            StepError,
            said,
            lambda: hpczero.checkpoint.save("never", model, optimizer, step=1),
        )


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_averages_of_the_weights(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology):
        average = hpczero.optim.EMA(model, decay=0.9)
        model.layers[1].requires_grad_(True)
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "while averages of the weights are kept", optimizer.step)
        average.close()
        optimizer.step()
