"""What a loop may expect of ``parameter.grad`` and does not get: other contents, derivatives. Refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpczero.errors import StepError
from tests.helpers.small_models import MLP, grad, mlp_backward, mlp_input, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

WARNS = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _data(model: nn.Module) -> None:
    parameter = next(model.parameters())
    grad(parameter).data = torch.zeros(parameter.shape)


def _set(model: nn.Module) -> None:
    parameter = next(model.parameters())
    grad(parameter).set_(torch.zeros(parameter.shape))


@STAGES
@pytest.mark.parametrize("put", [_data, _set])
def test_other_contents_are_refused(world: World, stage, put):
    with world.mlp(sgd, stage=stage) as (model, _):
        mlp_backward(model, world.rank)
        with pytest.raises(
            StepError, match=r"(data = |set_).*full_gradients.*mul_, clamp_.*param_groups"
        ):
            put(model)
        seen = grad(next(model.parameters()))
        before = float(seen.norm())
        seen.data = seen.data  # as module.to() does where nothing changes
        seen.data.mul_(2.0)
        after = float(grad(next(model.parameters())).norm())
        world.check(abs(after - 2.0 * before) < 1e-5 * before)


def _of_numpy(gradient: Tensor) -> object:
    array: object = np.from_dlpack(gradient)
    return array


READERS: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda gradient: gradient.numpy(),
    "np.asarray": np.asarray,
    "np.from_dlpack": _of_numpy,
    "apply_": lambda gradient: gradient.apply_(lambda value: 0.0),
    "map_": lambda gradient: gradient.map_(gradient, lambda value, other: 0.0),
    "tolist": lambda gradient: gradient.tolist(),
    "share_memory_": lambda gradient: gradient.share_memory_(),
    "untyped_storage": lambda gradient: gradient.untyped_storage(),
    "data_ptr": lambda gradient: gradient.data_ptr(),
    "storage": lambda gradient: gradient.storage(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_memory_of_a_gradient_that_has_none_here_is_refused(world: World, read):
    with world.mlp(sgd, stage=3) as (model, _):
        mlp_backward(model, world.rank)
        with pytest.raises(StepError, match="needs its elements"):
            read(grad(next(model.parameters())))


def test_grad_by_torchs_other_name(world: World):
    model, local = MLP(), MLP()
    mlp_backward(local, world.rank)
    optimizer = sgd(model)
    with world.zeroified(model, optimizer, stage=3):
        parameter, other = next(model.parameters()), next(local.parameters())
        with pytest.raises(StepError, match="was assigned a tensor"):  # as asynchronous RL does
            parameter._grad = other._grad
        mlp_backward(model, world.rank)
        assert parameter._grad is not None
        world.check(parameter._grad.norm() == grad(parameter).norm() > 0)
        for piece in optimizer.param_groups[0]["params"]:
            with pytest.raises(StepError, match="this rank's pieces"):
                piece._grad.norm()


def test_what_gets_at_its_memory_all_the_same_finds_no_number(world: World):
    with world.mlp(sgd, stage=3) as (model, _):
        mlp_backward(model, world.rank)
        gradient = grad(next(model.parameters()))
        kept = torch.zeros(gradient.shape)
        kept.data = gradient  # torch asks nobody
        world.check(bool(kept.isnan().all()))
        try:
            capsule = torch.utils.dlpack.to_dlpack(gradient)  # type: ignore[attr-defined]
        except StepError as refused:  # torch 2.8 asks
            world.check("needs its elements" in str(refused))
        else:
            world.check(bool(torch.utils.dlpack.from_dlpack(capsule).isnan().all()))


@WARNS
@STAGES
def test_a_penalty_on_norms_of_gradients_is_refused(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        model(mlp_input(world.rank)).square().mean().backward(create_graph=True)
        parameter = next(model.parameters())
        said = "derivatives of gradients with respect to parameters are not available"
        with pytest.raises(StepError, match=said):
            grad(parameter).norm()
        with torch.no_grad():
            first = float(grad(parameter).norm())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        mlp_backward(model, world.rank)
        world.check(float(grad(parameter).norm()) != first)
