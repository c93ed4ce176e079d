"""The gradient norm is that of fp64 arithmetic at every size, and does not depend on stage, rank or cut."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import hpczero
from tests.helpers.parallel import parallel_assert
from tests.small_models import zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

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


@pytest.mark.parametrize("numel", [10**5, 10**6, 10**7])
def test_clipping_is_by_the_norm_of_fp64_in_every_stage(
    comm: MPI.Intracomm, topology: Topology, numel: int
) -> None:
    norms = []
    for stage in STAGES:
        model = nn.Sequential(*map(Slope, slopes(numel, rank=comm.rank)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with zeroified(model, optimizer, stage=stage, topology=topology):
            model(torch.zeros(())).backward()
            before = gradients(model)
            norms.append(hpczero.clip_grad_norm_(model, 0.5))
            after = gradients(model)
        expected = float(np.linalg.norm(before))
        parallel_assert(comm, norms[-1] == pytest.approx(expected, rel=1e-12), str(norms))
        # One rounding of the factor and one of the product, each 6e-8 at most.
        close = np.allclose(after, before * (0.5 / (expected + 1e-6)), rtol=1.2e-7, atol=0.0)
        parallel_assert(comm, close, f"stage {stage}")
    everywhere = comm.allgather(norms)
    parallel_assert(
        comm, all(mine == [norms[0]] * len(STAGES) for mine in everywhere), str(everywhere)
    )


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_values_whose_squares_fp32_cannot_hold(
    comm: MPI.Intracomm, topology: Topology, scale: float
) -> None:
    for stage in STAGES:
        model = nn.Sequential(*map(Slope, slopes(5000, rank=comm.rank, scale=scale)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with zeroified(model, optimizer, stage=stage, topology=topology):
            model(torch.zeros(())).backward()
            expected = float(np.linalg.norm(gradients(model)))
            found = hpczero.clip_grad_norm_(model, math.inf)
        parallel_assert(comm, found == pytest.approx(expected, rel=1e-12, abs=0.0), str(found))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_of_what_is_not_finite(comm: MPI.Intracomm, topology: Topology, value: float) -> None:
    mine = slopes(1000, rank=comm.rank)
    if comm.rank == comm.size - 1:
        mine[2][3] = value
    model = nn.Sequential(*map(Slope, mine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeroified(model, optimizer, stage=2, topology=topology):
        model(torch.zeros(())).backward()
        found = [hpczero.clip_grad_norm_(model, math.inf, norm_type=p) for p in (2.0, math.inf)]
        parallel_assert(comm, all(str(f) == str(value) for f in found), str(found))
