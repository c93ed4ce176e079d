"""The gradient norm is that of fp64 arithmetic at every size, and does not depend on stage, rank or cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import hpczero
from tests.helpers.small_models import MLP, adamw, grad, mlp_backward
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = (0, 1, 2, 3)


class Slope(nn.Module):
    """Adds ``sum(weight * slope)`` to its input, so that the gradient is ``slope``."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(slope))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.dot(self.weight, self.slope)


def slopes(numel: int, *, rank: int, scale: float = 1.0) -> list[Tensor]:
    """Values over 24 binades in three units of unequal length; other ones on every rank."""
    generator = torch.Generator().manual_seed(numel + rank)
    exponents = torch.randint(-12, 13, (numel,), generator=generator)
    values = scale * torch.ldexp(torch.randn(numel, generator=generator), exponents)
    return list(values.split([numel // 5, 7, numel - numel // 5 - 7]))


def gradients(model: nn.Module) -> npt.NDArray[np.float64]:
    """The mean gradient of all parameters in fp64. Collective."""
    found = hpczero.full_gradients(model).values()
    return np.concatenate([gradient.numpy().astype(np.float64) for gradient in found])


@contextmanager
def sloped(world: World, slopes: list[Tensor], **options: Any) -> Iterator[nn.Module]:
    """A model whose gradients on this rank are ``slopes``, sharded inside, after its backward."""
    model = nn.Sequential(*map(Slope, slopes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.zeroified(model, optimizer, **options):
        model(torch.zeros(())).backward()
        yield model


@pytest.mark.parametrize("numel", [10**5, 10**6, pytest.param(10**7, marks=pytest.mark.slow)])
def test_clipping_is_by_the_norm_of_fp64_in_every_stage(world: World, numel):
    norms = []
    for stage in STAGES:
        with sloped(world, slopes(numel, rank=world.rank), stage=stage) as model:
            before = gradients(model)
            norms.append(hpczero.clip_grad_norm_(model, 0.5))
            after = gradients(model)
        expected = float(np.linalg.norm(before))
        world.check(norms[-1] == pytest.approx(expected, rel=1e-12), norms)
        # One rounding of the factor and one of the product, each 6e-8 at most.
        close = np.allclose(after, before * (0.5 / (expected + 1e-6)), rtol=1.2e-7, atol=0.0)
        world.check(close, f"stage {stage}")
    everywhere = world.comm.allgather(norms)
    world.check(all(mine == [norms[0]] * len(STAGES) for mine in everywhere), everywhere)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_values_whose_squares_fp32_cannot_hold(world: World, scale):
    for stage in STAGES:
        with sloped(world, slopes(5000, rank=world.rank, scale=scale), stage=stage) as model:
            expected = float(np.linalg.norm(gradients(model)))
            found = hpczero.clip_grad_norm_(model, math.inf)
        world.check(found == pytest.approx(expected, rel=1e-12, abs=0.0), found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_of_what_is_not_finite(world: World, value):
    mine = slopes(1000, rank=world.rank)
    if world.rank == world.size - 1:
        mine[2][3] = value
    rule = lambda model: [(name,) for name, _ in model.named_children()]  # noqa: E731
    with sloped(world, mine, stage=2, rule=rule) as model:
        found = [hpczero.clip_grad_norm_(model, math.inf, norm_type=p) for p in (2.0, math.inf)]
        world.check(all(str(f) == str(value) for f in found), found)


def test_norm_of_a_gradient_keeps_dimensions_and_takes_a_dtype(world: World):
    model = MLP()
    norms: dict[str, Callable[[Any], Any]] = {
        "linalg": lambda g: torch.linalg.vector_norm(g, keepdim=True, dtype=torch.float64),
        "positional": lambda g: torch.linalg.vector_norm(g, 2.0, None, True),
        "norm": lambda g: torch.norm(g, keepdim=True),
        "foreach": lambda g: torch._foreach_norm([g], 2.0, torch.float64)[0],
        "plain": lambda g: g.norm(),
    }
    with world.zeroified(model, adamw(model), stage=3):
        mlp_backward(model, world.rank)
        whole = hpczero.full_gradients(model)
        for name, parameter in model.named_parameters():
            for what, norm in norms.items():
                found, expected = norm(grad(parameter)), norm(whole[name])
                alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
                world.check(alike, f"{what}: {found} instead of {expected}")
                world.check(torch.allclose(found, expected), what)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda g: g.fill_(0),
    "fill_ with a number": lambda g: g.fill_(0.25),
    "nan_to_num out": lambda g: torch.nan_to_num(g, out=g),
    "clamp_min out": lambda g: torch.clamp_min(g, 0.1, out=g),
    "mul out": lambda g: torch.mul(g, 0.5, out=g),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("stage", [0, 3])
def test_changes_of_a_gradient_into_itself(world: World, stage, change):
    with world.mlp(adamw, stage=stage) as (model, _):
        mlp_backward(model, world.rank)
        expected = hpczero.full_gradients(model)
        for parameter in model.parameters():
            change(grad(parameter))
        for name, found in hpczero.full_gradients(model).items():
            change(expected[name])
            world.check(torch.equal(found, expected[name]), name)
