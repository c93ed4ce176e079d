"""What every reducer must do. A new one adds a file beside ``test_reducer.py`` with a subclass and its ``make``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from tests.helpers.world import World

if TYPE_CHECKING:
    from hpczero import Collectives, Topology
    from hpczero.zero.units.gradients import Reducer

SHARD, DTYPES = 37, (torch.float32, torch.bfloat16)


def gradient(rank: int, ranks: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHARD * ranks, generator=generator).to(dtype)


@pytest.mark.mpi
class ReducerSuite:
    """Subclass it as ``TestX``; ``make`` builds the reducer over a transport.

    Attributes:
        tolerance: largest error of one reduction, relative to the largest element; 0 for the sum of fp32 itself.
        steps: reductions of one unit after which the sum of all results is within ``tolerance`` of the exact one. Of a
            reducer that carries errors on to the next step, more than one.
    """

    make: Any
    tolerance: float = 1e-6
    steps: int = 1

    @pytest.fixture
    def transport(self, topology: Topology) -> Iterator[Collectives]:
        transport = hpczero.Flat(topology)
        yield transport
        transport.close()

    @pytest.fixture
    def reducer(self, transport: Collectives) -> Reducer:
        reducer: Reducer = type(self).make(transport)
        return reducer

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_results_add_up_to_the_mean(self, world: World, reducer: Reducer, dtype, accumulate):
        total, exact = torch.zeros(SHARD), torch.zeros(SHARD, dtype=torch.float64)
        mine = slice(world.topology.shard_index * SHARD, (world.topology.shard_index + 1) * SHARD)
        for step in range(self.steps):
            local = gradient(world.rank, world.size, dtype, step)
            before = local.clone()
            into = torch.full((SHARD,), 2.0)
            how: Any = {"scale": 1.0 / world.size, "accumulate": accumulate}
            reducer.reduce(local, into, **how, name="u").wait()
            world.check(torch.equal(local, before), "the gradient was written")
            total += into - 2.0 * accumulate
            everybody = [gradient(r, world.size, dtype, step).double() for r in range(world.size)]
            exact += (sum(everybody) / torch.tensor(float(world.size)))[mine]
        error = (total - exact).abs().max() / exact.abs().max()
        world.check(bool(error <= self.tolerance), f"off by {error:.1e}")

    def test_units_do_not_mix(self, world: World, transport, reducer: Reducer):
        """What is kept from step to step belongs to one unit."""
        alone = type(self).make(transport)
        for step in range(3):
            other = gradient(world.rank, world.size, torch.float32, 50 + step)
            how: Any = {"scale": 1.0, "accumulate": False}
            reducer.reduce(other, torch.empty(SHARD), **how, name="other").wait()
            found, expected = torch.empty(SHARD), torch.empty(SHARD)
            for each, into in ((reducer, found), (alone, expected)):
                local = gradient(world.rank, world.size, torch.float32, step)
                each.reduce(local, into, **how, name="u").wait()
            world.check(torch.equal(found, expected), f"step {step}")
