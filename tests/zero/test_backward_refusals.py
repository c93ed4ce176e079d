"""Backward passes that cannot be right are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    check_trains,
    mlp_input,
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


class Recompute(torch.autograd.Function):
    """A reversible block: its backward calls the module again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return cast(Tensor, module(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(MLP):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = Recompute.apply(x, layer)
        return x


@STAGES
def test_modules_called_in_the_backward_of_a_function(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = Reversible()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        output = model(mlp_input(comm.rank)).sum()
        with pytest.raises(StepError, match="Functions do that call modules in their backward"):
            output.backward()
        model.zero_grad()


class SparseLookup(nn.Embedding):
    """Sparse gradients that no option of the module tells of."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, sparse=True)


def test_sparse_gradient(comm: MPI.Intracomm, topology: Topology) -> None:
    model = nn.Sequential(SparseLookup(5, 3), nn.Linear(3, 1))
    with zeroified(model, adamw(model), stage=2, topology=topology):
        output = model(torch.arange(5)).sum()
        with pytest.raises(
            StepError, match=r"parameter '0\.weight' got a torch\.sparse_coo gradient"
        ):
            output.backward()
        model.zero_grad()


def test_fp16_forward_of_a_part_of_the_model(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, precision="fp16", topology=topology):
        with pytest.raises(StepError, match="carry no loss scale; call the model itself"):
            model.layers[0](mlp_input(comm.rank).half())
        with torch.no_grad():
            model.layers[0](mlp_input(comm.rank).half())


# --- recovery


class Hidden(MLP):
    """Returns one thing, and puts another, made earlier or later, where nobody looks."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.layers[1] = HidingLayer(later=later)


class HidingLayer(nn.Module):
    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((15, 15), 0.1))
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        if self.later:
            output = torch.tanh(x @ self.weight)
        HIDDEN.append((x @ self.weight).square().sum())
        return output if self.later else torch.tanh(x @ self.weight)


HIDDEN: list[Tensor] = []


@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_way_into_a_unit_that_nobody_sees_is_an_error_on_every_transport(
    comm: MPI.Intracomm,
    topology: Topology,
    transport: str,
    strict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCZERO_STRICT", strict)
    model = Hidden(later=False)
    with zeroified(model, adamw(model), stage=3, topology=topology, transport=transport):
        HIDDEN.clear()
        model(mlp_input(comm.rank))
        # On memory that lasts the error is ours; where it is gone torch is the first to notice.
        with pytest.raises(
            (StepError, RuntimeError), match=r"no hook sees|of size 0|not allocated"
        ):
            HIDDEN[0].backward()
        HIDDEN.clear()
        model.zero_grad()


def hidden_loss(model: nn.Module, rank: int, *, alone: bool) -> Tensor:
    HIDDEN.clear()
    output = model(mlp_input(rank)).square().sum()
    return HIDDEN.pop() + (0.0 if alone else output)


def with_a_hook(model: Hidden) -> Hidden:
    """A penalty on a unit's weight, made in a forward hook of the user's."""
    unit = model.layers[2]
    unit.register_forward_hook(
        lambda module, args, output: HIDDEN.append(HIDDEN.pop() + module[0].weight.square().sum())
    )
    return model


@STAGES
@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
@pytest.mark.parametrize(("later", "alone"), [(True, True), (True, False), (False, False)], ids=str)
def test_what_is_put_where_nobody_looks_trains_as_in_plain_torch(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    later: bool,
    alone: bool,
) -> None:
    plain = with_a_hook(Hidden(later=later))
    total = sum(hidden_loss(plain, rank, alone=alone) / comm.size for rank in range(comm.size))
    assert isinstance(total, Tensor)
    total.backward()
    model = with_a_hook(Hidden(later=later))
    with zeroified(model, adamw(model), stage=stage, topology=topology, transport=transport):
        hidden_loss(model, comm.rank, alone=alone).backward()
        for name, found in hpczero.full_gradients(model).items():
            expected = plain.get_parameter(name).grad
            close = torch.allclose(
                found, torch.zeros_like(found) if expected is None else expected, atol=1e-5
            )
            parallel_assert(comm, close, name)


@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_mutation_on_saved_tensors_is_refused_where_parameters_are_sharded(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, transport=transport):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            with torch.no_grad():
                model(mlp_input(comm.rank))
            with pytest.raises(StepError, match="or train at stage 2"):
                model(mlp_input(comm.rank))
        check_trains(comm, model, optimizer)
