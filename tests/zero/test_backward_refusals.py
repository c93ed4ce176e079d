"""Backward passes that cannot be right are refused; after one that failed, zero_grad recovers."""

from __future__ import annotations

from collections.abc import Callable
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
    mlp_backward,
    mlp_input,
    raises_on_all,
    same,
    sgd,
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


def zero_one_by_one(model: nn.Module) -> None:
    """As a loop of the user's own."""
    for parameter in model.parameters():
        parameter.grad = None


ZEROED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "the model": lambda model, optimizer: model.zero_grad(),
    "one by one": lambda model, optimizer: zero_one_by_one(model),
}


@STAGES
@pytest.mark.parametrize("zero", ZEROED)
def test_what_autograd_had_just_left_on_a_parameter_is_gone_with_the_other_gradients(
    comm: MPI.Intracomm, topology: Topology, stage: int, zero: str
) -> None:
    model = MLP()
    fails: list[str] = []
    optimizer = sgd(model)

    def fail(parameter: Tensor) -> None:
        if fails:
            raise FloatingPointError(fails.pop())

    model.get_parameter("layers.1.0.weight").register_post_accumulate_grad_hook(fail)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        mlp_backward(model, comm.rank)
        expected = hpczero.full_gradients(model)
        optimizer.zero_grad()
        fails.append("before any hook of ours has come")
        with pytest.raises(FloatingPointError):
            mlp_backward(model, comm.rank)
        ZEROED[zero](model, optimizer)
        mlp_backward(model, comm.rank)
        found = hpczero.full_gradients(model)
        parallel_assert(comm, same(list(found.values()), list(expected.values())))


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


class Interrupted(MLP):
    """Raises when its first layer has run."""

    stop = True

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.layers[0](x)]
        if self.stop:
            raise ValueError("no such input")
        return super().forward(x)


def test_forward_that_ended_by_an_exception_is_not_told_to_return_its_results(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    model, outside = Interrupted(), []
    model.layers[0].register_forward_hook(lambda module, args, output: outside.append(output))
    optimizer = adamw(model)
    with (
        caplog.at_level("WARNING", logger="hpczero"),
        zeroified(model, optimizer, stage=3, topology=topology, transport="flat"),
    ):
        with pytest.raises(ValueError, match="no such input"):
            model(mlp_input(comm.rank))
        told = [record.getMessage() for record in caplog.records]
        parallel_assert(comm, not any("stays whole" in each for each in told), str(told))
        model.stop = False
        check_trains(comm, model, optimizer)
