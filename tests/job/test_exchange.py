"""Tensors, objects and decisions that all ranks get, and ranks that are in different calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpczero.errors import CommError
from hpczero.job import messages
from hpczero.job.messages import ChunkedExchange
from tests.helpers.small_models import raises_on_all
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_ranks_keep_their_bits(world: World, dtype: torch.dtype) -> None:
    """Of another length on each rank, nothing on the last; not contiguous."""

    def of(rank: int) -> torch.Tensor:
        length = 0 if rank == world.size - 1 else 2 * rank + 3
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(5, length, generator=generator) * 3).to(dtype).t()

    found = ChunkedExchange(world.topology).joined(of(world.rank), "gather")
    expected = torch.cat([of(rank) for rank in range(world.size)])
    world.check(found.dtype == dtype and torch.equal(found, expected), str(found))


def test_numbers_and_reductions(world: World) -> None:
    exchange, ranks = ChunkedExchange(world.topology), torch.arange(world.size)
    world.check(exchange.joined(torch.tensor(world.rank), "gather").equal(ranks))
    mine = torch.tensor([world.rank, -world.rank], dtype=torch.float32)
    expected = torch.stack([ranks, -ranks], dim=1).float()
    world.check(exchange.reduced(mine, "sum", "reduce").equal(expected.sum(0)))
    world.check(exchange.reduced(mine, "mean", "reduce").allclose(expected.mean(0)))
    world.check(exchange.reduced(mine, "max", "reduce").equal(expected.amax(0)))
    found = exchange.any_of({"a": world.rank == 0, "b": False}, "agree")
    world.check(found == {"a": True, "b": False})
    world.check(exchange.of_root({"from": world.rank}, "tell") == {"from": 0})


@pytest.mark.parametrize("first", [True, False])
def test_padding_reaches_the_longest_of_any_rank(world: World, first: bool) -> None:
    mine = torch.full((2, world.rank + 1), float(world.rank))
    found = ChunkedExchange(world.topology).padded(mine, 1, -100, first=first, what="pad")
    more = torch.full((2, world.size - world.rank - 1), -100.0)
    expected = torch.cat([more, mine] if first else [mine, more], dim=1)
    world.check(found.equal(expected), str(found))


@pytest.mark.ranks(2, 3)
def test_ranks_in_different_calls_are_named(world: World) -> None:
    what = "save" if world.rank == 1 else "evaluate a batch"
    said = "rank 1 is about to save, and rank 0 to evaluate a batch"
    raises_on_all(world.comm, CommError, said, messages.same_call, world.topology.world, what)


@pytest.mark.ranks(2, 3)
def test_tensors_that_cannot_be_joined_are_named(world: World) -> None:
    kinds = torch.ones(2, dtype=torch.int64 if world.rank == 1 else torch.float32)
    shapes = torch.ones(2, 3 + world.rank)
    for said, tensor in (("torch.int64", kinds), (r"shape \(2, 4\)", shapes)):
        joined = ChunkedExchange(world.topology).joined
        raises_on_all(world.comm, CommError, f"rank 1 brings {said}", joined, tensor, "gather")


def test_large_arrays_go_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNK_NBYTES", 10)
    found = messages.arrays(world.topology.world, np.full(7 + world.rank, world.rank), "gather")
    same = [np.array_equal(each, np.full(7 + rank, rank)) for rank, each in enumerate(found)]
    world.check(all(same), str(found))
