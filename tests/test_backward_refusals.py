"""Backward passes that cannot be right are refused; after one that failed, zero_grad recovers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.small_models import (
    MLP,
    adamw,
    check_trains,
    mlp_backward,
    mlp_input,
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


class Checkpointed(MLP):
    """Each layer recomputed in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@STAGES
def test_reentrant_checkpointing(comm: MPI.Intracomm, topology: Topology, stage: int) -> None:
    model = Checkpointed(use_reentrant=True)
    x = mlp_input(comm.rank).requires_grad_()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        output = model(x).sum()
        with pytest.raises(StepError, match=r"reentrant.*use_reentrant=False"):
            output.backward()
        model.zero_grad()


@STAGES
def test_whole_model_in_a_reentrant_checkpoint(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    x = mlp_input(comm.rank).requires_grad_()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        output = checkpoint(model, x, use_reentrant=True)
        with pytest.raises(StepError, match=r"reentrant.*use_reentrant=False"):
            output.sum().backward()
        model.zero_grad()


class LateUser(MLP):
    """The root uses a weight of the last unit first, so its gradient is complete only at the very end."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[2].get_parameter("0.weight")  # (3, 15)
        return super().forward(x + F.linear(x.new_ones(15), weight).sum())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradient_that_comes_after_its_unit_was_reduced(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = LateUser()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        output = model(mlp_input(comm.rank)).sum()
        said = r"gradient of 'layers\.2\.0\.weight' arrived after its unit 'layers\.2' was reduced"
        with pytest.raises(StepError, match=said):
            output.backward()
        model.zero_grad()


def test_sparse_gradient(comm: MPI.Intracomm, topology: Topology) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    with zeroified(model, adamw(model), stage=2, topology=topology):
        output = model(torch.arange(5)).sum()
        with pytest.raises(
            StepError, match=r"parameter '0\.weight' got a torch\.sparse_coo gradient"
        ):
            output.backward()
        model.zero_grad()


def test_fp16_backward_that_does_not_come_through_the_model(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, precision="fp16", topology=topology):
        output = model.layers[0](mlp_input(comm.rank).half()).sum()
        with pytest.raises(StepError, match="carry no loss scale; call the model itself"):
            output.backward()
        model.zero_grad()


# --- recovery


class Fragile(MLP):
    """Raises in the middle layer when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.broken and index == 2:
                raise FloatingPointError("bad sample")
            x = layer(x)
        return x


@STAGES
def test_exception_in_forward_on_all_ranks_then_recovery(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = Fragile()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        model.broken = True
        with pytest.raises(FloatingPointError):
            model(mlp_input(comm.rank))
        model.broken = False
        parallel_assert(comm, sharding.memory.current.get("unsharded", 0) == 0)
        check_trains(comm, model, optimizer)


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise FloatingPointError("in backward")


class FragileBackward(Fragile):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.broken and index == 1:
                x = BrokenBackward.apply(x)
        return x


@STAGES
def test_exception_in_backward_on_all_ranks_then_recovery(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = FragileBackward()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        model.broken = True
        with pytest.raises(FloatingPointError):
            mlp_backward(model, comm.rank)
        model.broken = False
        with pytest.raises(StepError, match=r"call optimizer\.zero_grad\(\) before"):
            mlp_backward(model, comm.rank)
        optimizer.zero_grad()
        parallel_assert(comm, sharding.memory.current.get("unsharded", 0) == 0)
        check_trains(comm, model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_step_after_an_interrupted_backward_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    # some units were reduced and others were not: an update would use half a gradient
    model = FragileBackward()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        model.broken = True
        with pytest.raises(FloatingPointError):
            mlp_backward(model, comm.rank)
        raises_on_all(
            comm,
            StepError,
            "the last backward did not finish .*optimizer.zero_grad",
            optimizer.step,
        )
        optimizer.zero_grad()
        parallel_assert(comm, same(values(sharding), before))
