"""What is legal and seldom meant is told once, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_input, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Dropping(MLP):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class Advice:
    """What has been told on this rank."""

    def __init__(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("WARNING", logger="hpczero")
        self.world, self.caplog = world, caplog

    def check(self, part: str, *, times: int = 1) -> None:
        """So often rank 0 was told something with ``part`` in it, and the others nothing. Collective."""
        messages = [record.getMessage() for record in self.caplog.records]
        found = sum(part in message for message in messages)
        self.world.check(found == (times if self.world.rank == 0 else 0), f"{part}: {messages}")

    def train(
        self,
        model: nn.Module,
        inputs: Callable[[int], Tensor] | None = None,
        seed: int | None = None,
    ) -> None:
        """Three steps."""
        optimizer = adamw(model)
        with self.world.zeroified(model, optimizer):
            if seed is not None:
                torch.manual_seed(seed)
            for step in range(3):
                x = inputs(step) if inputs else mlp_input(self.world.rank)
                model(x).square().mean().backward()
                update(optimizer)


@pytest.fixture
def advice(world: World, caplog: pytest.LogCaptureFixture) -> Advice:
    return Advice(world, caplog)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))


def test_batches_of_different_sizes(world: World, advice):
    advice.train(MLP(), lambda step: mlp_input(world.rank)[: 4 - world.rank])
    advice.check("mean of the ranks' means")


def test_the_same_random_numbers_on_all_ranks(advice):
    advice.train(Dropping(0.2), seed=1)
    advice.check("draw the same random numbers")


@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_nothing_is_told_where_all_is_well(world: World, advice, probability):
    advice.train(Dropping(probability), seed=world.rank if probability else 1)
    advice.check("", times=0)


def test_batch_statistics(advice):
    advice.train(normed())
    advice.check("batch statistics, first '1'")


def test_initialize_fills_no_buffers(world: World, advice):
    model = normed()
    with world.zeroified(model, adamw(model), initialize=lambda name, t: t.fill_(0.1)):
        pass
    advice.check("initialize fills parameters only: 2 persistent")


def test_the_optimizers_state_is_this_ranks_own(world: World, advice):
    with world.mlp(adamw) as (model, optimizer):
        mlp_backward(model, world.rank)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        of_rank_0 = world.comm.bcast(state, root=0)
        if world.rank:
            said = r"rank 1: .* of rank 0 of 2, cut, expected one of rank 1"
            with pytest.raises(StepError, match=said):
                optimizer.load_state_dict(of_rank_0)
        plain = MLP()
        other = adamw(plain)
        mlp_backward(plain, 0)
        other.step()
        with pytest.raises(StepError, match="of a plain model"):
            optimizer.load_state_dict(other.state_dict())
    advice.check("holds the shards of the rank that calls it")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("logged", [False, True], ids=["penalty", "logged"])
def test_a_penalty_on_weights_read_in_gathered(world: World, advice, stage, precision, logged):
    with world.mlp(adamw, stage=stage, precision=precision) as (model, optimizer):
        for _ in range(2):
            loss = model(mlp_input(world.rank)).float().square().mean()
            with hpczero.gathered(model), torch.set_grad_enabled(not logged):
                penalty = sum(p.float().square().sum() for p in model.parameters())
            (loss + 1e-3 * penalty).backward()
            optimizer.zero_grad()
    advice.check("inside gathered", times=int(precision == "fp16" and not logged))


HELD_BY_SOMETHING: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: next(model.parameters()).data,
    "numpy": lambda model: next(model.parameters()).detach().numpy(),
    "view": lambda model: next(model.parameters()).detach().t(),
}
HELD_BY_NOBODY: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "copy": lambda model: copy.deepcopy(model),
    "the parameter": lambda model: list(model.named_parameters()),
}


@pytest.mark.parametrize("holder", [*HELD_BY_SOMETHING, *HELD_BY_NOBODY])
def test_memory_of_parameters_that_is_held_by_something_else(advice, holder):
    model = MLP()
    held = {**HELD_BY_SOMETHING, **HELD_BY_NOBODY}[holder](model)
    advice.train(model)
    advice.check("held by something else", times=int(holder in HELD_BY_SOMETHING))
    del held


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_that_a_release_has_just_left_is_held_by_nobody(world: World, advice, stage):
    model = MLP()
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=stage, transport="flat", topology=world.topology)
    hpczero.release(model, whole=True)
    del optimizer  # which holds its pieces
    advice.train(model)
    advice.check("held by something else", times=0)


class OneStorage(nn.Module):
    """Parameters and a buffer that are views of one tensor, as some loaders and recurrent layers make them."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(7 * 3 + 3 + 3, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(flat[:21].view(3, 7))
        self.bias = nn.Parameter(flat[21:24])
        self.register_buffer("shift", flat[24:])


class TiedLinear(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("build", [OneStorage, lambda: nn.LSTM(7, 3), TiedLinear])
def test_models_whose_own_tensors_share_memory_are_told_nothing(world: World, advice, build):
    model = build()
    with world.zeroified(model, adamw(model)):
        pass
    advice.check("", times=0)
