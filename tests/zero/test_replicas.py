"""Stage 0: ranks that would drift apart are told; those that do the same are left alone. Stages 1 to 3 need neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hpczero
from hpczero.errors import StepError
from hpczero.kernels.norm import sum_of_bits
from tests.helpers.small_models import MLP, grad, mlp_input, same, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


class Langevin(torch.optim.Optimizer):
    """SGD with noise: draws random numbers inside its step."""

    hpczero_elementwise = True

    def __init__(self, parameters: Any, generator: torch.Generator) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn(parameter.shape, generator=self._generator)
                parameter.add_(grad(parameter) + 0.01 * noise, alpha=-group["lr"])


def _into_gradients(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        grad(parameter).add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def _into_values(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise, alpha=0.01)


def _into_one_value(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    parameter = optimizer.param_groups[0]["params"][-1]
    factors = torch.ones(parameter.shape)
    factors[-1] += torch.rand((), generator=generator)
    parameter.data.mul_(factors)


def _into_one_momentum(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for state in list(optimizer.state.values())[:1]:
        state["momentum_buffer"].add_(torch.rand((), generator=generator))


NOISES = pytest.mark.parametrize(
    "add_noise",
    [_into_gradients, _into_values, _into_one_value, _into_one_momentum],
)


def _steps(
    world: World, seed: int, add_noise: Callable[..., None], *, steps: int, precision: str = "fp32"
) -> bool:
    """Train at stage 0; returns whether a step or what follows it raised on every rank."""
    generator = torch.Generator().manual_seed(seed)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with world.zeroified(model, optimizer, stage=0, precision=precision):
        try:
            for _ in range(steps):
                model(mlp_input(world.rank)).sum().backward()
                add_noise(optimizer, generator)
                update(optimizer)
            hpczero.full_state_dict(model)
        except StepError as error:
            return error.agreed and "are not those of rank 0" in str(error)
    return False


@NOISES
@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_noise_of_each_ranks_own_is_refused(world: World, add_noise, steps, precision):
    told = _steps(world, world.rank, add_noise, steps=steps, precision=precision)
    world.check(told == (world.size > 1), "ranks have drifted apart and nobody says so")


@NOISES
def test_the_same_noise_on_all_ranks_is_no_error(world: World, add_noise):
    world.check(not _steps(world, 7, add_noise, steps=4))


@pytest.mark.parametrize("save", [False, True], ids=["full_state_dict", "checkpoint"])
def test_an_optimizer_that_draws_its_own_numbers_is_found(world: World, folder, save):
    model = MLP()
    optimizer = Langevin(model.parameters(), torch.Generator().manual_seed(world.rank))
    with world.zeroified(model, optimizer, stage=0):
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()

        def use() -> None:
            if save:
                hpczero.checkpoint.save(folder, model, optimizer, step=1)
            else:
                hpczero.full_state_dict(model)

        if world.size == 1:
            use()
        else:
            world.raises(StepError, "are not those of rank 0", use)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_noise_of_each_ranks_own_is_right_where_the_optimizer_is_sharded(world: World, stage):
    generator = torch.Generator().manual_seed(world.rank)
    model = MLP()
    optimizer = Langevin(model.parameters(), generator)
    with world.zeroified(model, optimizer, stage=stage):
        for _ in range(3):
            model(mlp_input(world.rank)).sum().backward()
            _into_gradients(optimizer, generator)
            update(optimizer)
        with hpczero.gathered(model):
            values = [p.detach().clone() for p in model.parameters()]
    world.check(same(values, world.comm.bcast(values)), "ranks differ")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 1000, 4097])
def test_sums_of_bits_are_those_of_numpy_in_any_order(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    words = values.numpy()[: numel // 2 * 2].view(np.int64)
    tail = values.numpy()[numel // 2 * 2 :].view(np.uint8)
    expected = (sum(words.tolist()) + sum(tail.tolist()) + 2**63) % 2**64 - 2**63
    assert int(sum_of_bits(values)) == expected
