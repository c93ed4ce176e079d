"""A number to read later: it is that of ``item()``, and a step that looks at a device anyway brings it along."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.errors import ConfigError
from hpczero.plan.precision import Precision
from hpczero.run.evaluation import PlainPasses
from hpczero.run.step import TrainingStep
from scaling.overhead.steps import Waits
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = (0, 1, 2, 3)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    """Of one rank's samples."""
    found: Tensor = model(mlp_input(rank)).square().mean()
    return found


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """The other AdamW asks for its counters, which lie on the host whatever the device."""
    return adamw(model, fused=True)


def asked(stage: int, comm: MPI.Intracomm) -> int:
    """Once; at stage 0 of several ranks once more, for what they hold alike."""
    return 1 + (stage == 0 and comm.size > 1)


def waits(call: Callable[[], object]) -> int:
    """Numbers that ``call`` asks of tensors."""
    with Waits() as counted:
        call()
    return sum(counted.found.values())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_reads_the_loss_along(
    comm: MPI.Intracomm, topology: Topology, norm_type: float
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=1, topology=topology):
        loss = loss_of(model, comm.rank)
        loss.backward()
        value = hpczero.read_later(model, loss)
        clipping = waits(lambda: hpczero.clip_grad_norm_(model, 0.1, norm_type))
        # A rank that owns nothing has no norm to ask for, and asks for the loss alone.
        parallel_assert(comm, clipping + waits(value) == 1, f"{clipping}")
        parallel_assert(comm, clipping == 1 or comm.rank == 2)
        parallel_assert(comm, value() == loss.item(), f"{value()} {loss.item()}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_clipping_reads_the_loss_along(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = fused(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        loss = loss_of(model, comm.rank)
        loss.backward()
        value = hpczero.read_later(model, loss)
        stepping = waits(optimizer.step)
        parallel_assert(comm, stepping + waits(value) == asked(stage, comm), f"{stepping}")
        parallel_assert(comm, stepping > 0 or comm.rank == 2)
        parallel_assert(comm, value() == loss.item(), f"{value()} {loss.item()}")


def test_asked_for_before_the_step_it_is_read_at_once(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, topology=topology):
        loss = loss_of(model, comm.rank)
        value = hpczero.read_later(model, loss)
        parallel_assert(comm, waits(value) == 1 and value() == loss.item())
        loss.backward()
        clipping = waits(lambda: hpczero.clip_grad_norm_(model, 1.0))
        parallel_assert(comm, clipping == 1 or comm.rank == 2)
        parallel_assert(comm, waits(value) == 0 and value() == loss.item())


def test_it_is_the_number_as_it_was(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    with zeroified(model, adamw(model), topology=topology):
        for made in (torch.tensor([[0.1]]), torch.tensor(0.1, dtype=torch.float64)):
            before = made.item()
            value = hpczero.read_later(model, made)
            made.fill_(7.0)
            parallel_assert(comm, value() == before, f"{value()} {before}")
        half = torch.tensor(0.1, dtype=torch.bfloat16)
        parallel_assert(comm, hpczero.read_later(model, half)() == half.item())


def test_what_is_no_number_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    with zeroified(model, adamw(model), topology=topology):
        for wrong in (torch.zeros(2), torch.zeros(0), torch.tensor(1j)):
            with pytest.raises(ConfigError, match="expected one real element"):
                hpczero.read_later(model, wrong)
    parallel_assert(comm, True)


def test_a_loss_that_is_not_finite_is_read_and_the_step_skipped_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizer = adamw(model)
    precision = Precision(nonfinite="skip")
    with zeroified(model, optimizer, stage=2, topology=topology, precision=precision) as state:
        odd = comm.rank == comm.size - 1
        loss = loss_of(model, comm.rank) * (math.nan if odd else 1.0)
        loss.backward()
        value = hpczero.read_later(model, loss)
        hpczero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        parallel_assert(comm, state.skipped_steps == 1)
        parallel_assert(comm, math.isnan(value()) if odd else value() == loss.item())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_step_of_a_run_asks_once(
    comm: MPI.Intracomm, topology: Topology, stage: int, accumulation: int
) -> None:
    model = MLP()
    optimizer = fused(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        step = TrainingStep(
            model,
            optimizer,
            passes=PlainPasses(
                model,
                loss=lambda model, x, y: F.mse_loss(model(x), y),
                accumulation=accumulation,
                accelerator=HostAccelerator(),
            ),
            samples=lambda number, micro: (
                mlp_input(number + micro + comm.rank).numpy(),
                torch.ones(4, 3).numpy(),
            ),
            accelerator=HostAccelerator(),
            clip=0.5,
        )
        for number in range(2):  # which make the optimizer's state, and see where it lies
            step.take(number)
        found = waits(lambda: step.take(2))
        parallel_assert(comm, found == asked(stage, comm), f"{found}")
