"""A forward or backward that an exception has ended: ``zero_grad`` recovers, a step before it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

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
