"""Buffers that forwards replace are those of rank 0 after a step, and are saved, as buffers changed in place are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hpczero
from hpczero.errors import PlanError, StepError
from tests.helpers.small_models import adamw, mlp_input, sgd, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class RunningMean(nn.Module):
    """Replaces one buffer in each forward, and adds another in the first."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if "largest" not in self._buffers:
            self.register_buffer("largest", x.detach().abs().amax())
        result: Tensor = self.linear(x - self.mean)
        return result


@STAGES
def test_replaced_buffers_are_those_of_rank_0_and_saved(world: World, stage, folder):
    plain = RunningMean()
    for step in range(3):
        plain(mlp_input(100 * step))
    model = RunningMean()
    optimizer = adamw(model, lr=0.0)
    with world.zeroified(model, optimizer, stage=stage):
        for step in range(3):
            model(mlp_input(world.rank + 100 * step)).square().sum().backward()
            update(optimizer)
        for name, expected in plain.named_buffers():
            world.check(torch.equal(model.get_buffer(name), expected), name)
        state = hpczero.full_state_dict(model)
        world.check(state is None or set(state) == set(plain.state_dict()))
        hpczero.checkpoint.save(folder, model, optimizer, step=3)
        model.mean = torch.zeros(7)
        hpczero.checkpoint.load(folder, model, optimizer)
        world.check(torch.equal(model.mean, plain.mean))


def test_buffers_that_went_apart_are_refused(world: World):
    model = RunningMean()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=2):
        model(mlp_input(world.rank)).square().sum().backward()
        if world.rank == 1:
            model.mean = model.mean.double()
        said = r"rank 1: .* buffer mean \(7,\) torch\.float64"
        world.raises(StepError, said, optimizer.step)
        model.mean = model.mean.float()
        optimizer.step()


# --- full_state_dict has what a plain model's state_dict has


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        result: Tensor = self.linear(x)
        return result


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm1d(15)
    return nn.Sequential(nn.Linear(7, 15), norm, nn.Linear(15, 15), norm)


def extra_state() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 15), Extra(), checkpoint_wrapper(Extra()))


def renamed() -> nn.Module:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").clone()

    model = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3))
    model[0].register_state_dict_post_hook(rename)
    return model


@STAGES
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (shared_norm, "fp32"),
        (extra_state, "fp32"),
        (extra_state, "bf16"),
        (renamed, "fp32"),
        (renamed, "bf16"),
    ],
)
def test_full_state_dict_is_as_that_of_a_plain_model(world: World, make, stage, precision):
    torch.manual_seed(5)
    model = make()
    expected = copy.deepcopy(model.state_dict())
    tensors = {name: value for name, value in expected.items() if isinstance(value, Tensor)}
    with world.zeroified(model, adamw(model), stage=stage, precision=precision):
        state = hpczero.full_state_dict(model)
        fine = state is None or list(state) == list(expected)
        world.check(fine, f"{state and list(state)} instead of {list(expected)}")
        world.check(state is None or all(torch.equal(state[n], v) for n, v in tensors.items()))
        model(mlp_input(world.rank)).square().sum().backward()
        world.check(all(p.grad is not None for p in model.parameters()))
        state = hpczero.full_state_dict(model)
        plain = make()
        if state is not None and make is not renamed:
            plain.load_state_dict(state)
        if make is extra_state:
            world.check(world.rank > 0 or plain.get_submodule("1").seen == 1)


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd keeps for backward."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.scale


@STAGES
def test_a_step_leaves_a_buffer_alone_that_nobody_changed(world: World, stage):
    model = Scaled(torch.ones(4))
    optimizer = sgd(model)
    with world.zeroified(model, optimizer, stage=stage):
        version = model.scale._version
        first, second = (model(torch.ones(2, 4)).sum() for _ in range(2))
        first.backward()
        optimizer.step()
        world.check(model.scale._version == version)
        second.backward()  # needs no parameter, as in plain torch
        model.scale.add_(0.0)  # the same bits, on all ranks
        if world.rank == 1:
            model.scale.mul_(2.0)
        version = model.scale._version
        optimizer.step()
        world.check(model.scale._version > version)  # on every rank, rank 0 too
        world.check(torch.equal(model.scale, torch.ones(4)))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:1].expand(4),
    "expanded inside": lambda x: x.view(4, 1).expand(4, 3),
    "strided": lambda x: x.view(2, 2).t(),
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "inference": lambda x: torch.inference_mode()(lambda: x * 1)(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replaced", [False, True])
def test_buffers_of_any_strides_are_those_of_rank_0_and_saved(world: World, form, replaced, folder):
    if form == "inference" and not replaced:
        pytest.skip("refused by zeroify")
    make = FORMS[form]
    given = make(torch.arange(4.0) + world.rank)
    model = Scaled(torch.zeros(given.shape, dtype=given.dtype) if replaced else given)
    optimizer = sgd(model)
    with world.zeroified(model, optimizer, stage=1):
        if replaced:
            model.scale = given
            model.bias.sum().backward()
            optimizer.step()
        world.check(torch.equal(model.scale, make(torch.arange(4.0))), model.scale)
        hpczero.checkpoint.save(folder, model, optimizer, step=1)
        model.scale = make(torch.zeros(4))
        hpczero.checkpoint.load(folder, model, optimizer)
        world.check(torch.equal(model.scale, make(torch.arange(4.0))), model.scale)


def test_sparse_persistent_buffer_is_refused(world: World):
    model = Scaled(torch.eye(4).to_sparse())
    said = r"buffer 'scale' is torch\.sparse_coo, expected a dense .* persistent=False"
    world.refuses(PlanError, said, model, sgd(model))
    model.register_buffer("scale", torch.eye(4).to_sparse(), persistent=False)
    with world.zeroified(model, sgd(model)):
        pass
