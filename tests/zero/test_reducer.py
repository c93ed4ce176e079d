"""The reducer of gradients: the mean over ranks, which is the sum of its transport in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.kernels.tree_sum import ShardSum
from hpczero.zero.units.gradients import Reducer
from tests.helpers.world import World

if TYPE_CHECKING:
    from hpczero import Collectives

pytestmark = [pytest.mark.mpi]

SHARD = 37


def gradient(rank: int, ranks: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHARD * ranks, generator=generator).to(dtype)


@pytest.fixture
def transport(world: World) -> Iterator[Collectives]:
    transport = hpczero.Flat(world.topology)
    yield transport
    transport.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_it_is_the_mean_over_ranks(world: World, transport, dtype, accumulate):
    local, into = gradient(world.rank, world.size, dtype), torch.full((SHARD,), 2.0)
    before = local.clone()
    whole = ShardSum(into, 1.0 / world.size, accumulate=accumulate)
    Reducer(transport).reduce(local, whole, name="u").wait()
    world.check(torch.equal(local, before), "the gradient was written")
    everybody = [gradient(rank, world.size, dtype).double() for rank in range(world.size)]
    mine = slice(world.topology.shard_index * SHARD, (world.topology.shard_index + 1) * SHARD)
    exact = torch.stack(everybody).mean(0)[mine]
    error = (into - 2.0 * accumulate - exact).abs().max() / exact.abs().max()
    world.check(bool(error <= 1e-6), f"off by {error:.1e}")


@pytest.mark.ranks(2, 3)
def test_it_is_the_sum_of_the_transport_bit_for_bit(world: World, transport):
    local = gradient(world.rank, world.size, torch.float32)
    found, expected = torch.empty(SHARD), torch.empty(SHARD)
    Reducer(transport).reduce(local, ShardSum(found, 0.3), name="u").wait()
    transport.reduce_scatter(local, expected, scale=0.3, name="u").wait()
    world.check(torch.equal(found, expected))
