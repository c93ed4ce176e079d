"""What is legal and seldom meant is told once, on rank 0 (issue 15, C)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Dropping(MLP):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


def told(
    caplog: pytest.LogCaptureFixture,
    topology: Topology,
    model: nn.Module,
    inputs: Callable[[int], Tensor],
    seed: int | None = None,
) -> list[str]:
    """Messages of three steps."""
    optimizer = adamw(model)
    with (
        caplog.at_level("WARNING", logger="hpczero"),
        zeroified(model, optimizer, topology=topology),
    ):
        if seed is not None:
            torch.manual_seed(seed)
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [record.getMessage() for record in caplog.records if record.name == "hpczero.advice"]


def once_on_root(comm: MPI.Intracomm, messages: list[str], part: str) -> None:
    expected = 1 if comm.rank == 0 else 0
    parallel_assert(comm, sum(part in m for m in messages) == expected, f"{part}: {messages}")


def test_batches_of_different_sizes(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    messages = told(caplog, topology, MLP(), lambda step: mlp_input(comm.rank)[: 4 - comm.rank])
    once_on_root(comm, messages, "mean of the ranks' means")


def test_the_same_random_numbers_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    messages = told(caplog, topology, Dropping(0.2), lambda step: mlp_input(comm.rank), seed=1)
    once_on_root(comm, messages, "draw the same random numbers")


@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_nothing_is_told_where_all_is_well(
    comm: MPI.Intracomm,
    topology: Topology,
    caplog: pytest.LogCaptureFixture,
    probability: float,
) -> None:
    seed = comm.rank if probability else 1
    model = Dropping(probability)
    messages = told(caplog, topology, model, lambda step: mlp_input(comm.rank), seed=seed)
    parallel_assert(comm, not messages, str(messages))


def test_batch_statistics(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    messages = told(caplog, topology, model, lambda step: mlp_input(comm.rank))
    once_on_root(comm, messages, "batch statistics, first '1'")


def test_initialize_fills_no_buffers(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    options: dict[str, Any] = {"topology": topology, "initialize": lambda name, t: t.fill_(0.1)}
    with caplog.at_level("WARNING", logger="hpczero"), zeroified(model, adamw(model), **options):
        pass
    messages = [record.getMessage() for record in caplog.records]
    once_on_root(comm, messages, "initialize fills parameters only: 2 persistent")


def test_the_optimizers_state_is_this_ranks_own(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with (
        caplog.at_level("WARNING", logger="hpczero"),
        zeroified(model, optimizer, topology=topology),
    ):
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        of_rank_0 = comm.bcast(state, root=0)
        if comm.rank:
            with pytest.raises(
                StepError, match=r"rank 1: .* of rank 0 of 2, cut, expected one of rank 1"
            ):
                optimizer.load_state_dict(of_rank_0)
        plain = MLP()
        other = adamw(plain)
        plain(mlp_input(0)).sum().backward()
        other.step()
        with pytest.raises(StepError, match="of a plain model"):
            optimizer.load_state_dict(other.state_dict())
    messages = [record.getMessage() for record in caplog.records]
    once_on_root(comm, messages, "holds the shards of the rank that calls it")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("logged", [False, True], ids=["penalty", "logged"])
def test_a_penalty_on_weights_read_in_gathered_in_fp16(
    comm: MPI.Intracomm,
    topology: Topology,
    caplog: pytest.LogCaptureFixture,
    stage: int,
    precision: str,
    logged: bool,
) -> None:
    model = MLP()
    optimizer = adamw(model)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with (
        caplog.at_level("WARNING", logger="hpczero.advice"),
        zeroified(model, optimizer, **options),
    ):
        for _ in range(2):
            loss = model(mlp_input(comm.rank)).float().square().mean()
            with hpczero.gathered(model), torch.set_grad_enabled(not logged):
                penalty = sum(p.float().square().sum() for p in model.parameters())
            (loss + 1e-3 * penalty).backward()
            optimizer.zero_grad()
    messages = [record.getMessage() for record in caplog.records]
    expected = 1 if comm.rank == 0 and precision == "fp16" and not logged else 0
    parallel_assert(comm, sum("inside gathered" in m for m in messages) == expected, str(messages))


HOLDERS: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: next(model.parameters()).data,
    "numpy": lambda model: next(model.parameters()).detach().numpy(),
    "tied by data": lambda model: nn.Parameter(next(model.parameters()).data),
    "view": lambda model: next(model.parameters()).detach().t(),
}
OTHERS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "copy": lambda model: copy.deepcopy(model),
    "clones": lambda model: {k: v.clone() for k, v in model.state_dict().items()},
    "the parameter": lambda model: list(model.named_parameters()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}


@pytest.mark.parametrize("holder", [*HOLDERS, *OTHERS])
def test_memory_of_parameters_that_is_held_by_something_else(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture, holder: str
) -> None:
    model = MLP()
    held = {**HOLDERS, **OTHERS}[holder](model)
    messages = told(caplog, topology, model, lambda step: mlp_input(comm.rank))
    expected = 1 if comm.rank == 0 and holder in HOLDERS else 0
    found = sum("held by something else" in m for m in messages)
    parallel_assert(comm, found == expected, f"{messages} {type(held)}")


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_that_a_release_has_just_left_is_held_by_nobody(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=stage, transport="flat", topology=topology)
    hpczero.release(model, whole=True)
    del optimizer  # which holds its pieces
    messages = told(caplog, topology, model, lambda step: mlp_input(comm.rank))
    parallel_assert(comm, not any("held by something else" in m for m in messages), f"{messages}")


class OneStorage(nn.Module):
    """Parameters and a buffer that are views of one tensor, as some loaders and recurrent layers make them."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(7 * 3 + 3 + 3, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(flat[:21].view(3, 7))
        self.bias = nn.Parameter(flat[21:24])
        self.register_buffer("shift", flat[24:])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + self.shift


@pytest.mark.parametrize("build", [OneStorage, lambda: nn.LSTM(7, 3), lambda: TiedLinear()])
def test_models_whose_own_tensors_share_memory_are_told_nothing(
    comm: MPI.Intracomm,
    topology: Topology,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[], nn.Module],
) -> None:
    model = build()
    with (
        caplog.at_level("WARNING", logger="hpczero.advice"),
        zeroified(model, adamw(model), topology=topology),
    ):
        pass
    parallel_assert(comm, not caplog.records, str([r.getMessage() for r in caplog.records]))


class TiedLinear(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
