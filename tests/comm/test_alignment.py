"""Blocks that a device sums begin at multiples of 16 bytes on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.comm import Collectives, Hierarchical, Uneven
from hpczero.comm.inside import MessageLevel
from hpczero.kernels import tree_sum as kernel
from hpczero.kernels.source import VECTOR_NBYTES
from hpczero.kernels.tree_sum import tree_sum
from hpczero.plan import footprint
from tests.comm.suite import contribution, expected_sum, own
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

SHARD_NUMEL = 64 * 163
# Bytes instead of 32 MiB: several chunks, and a size that none of these numbers divides.
SMALL = 2**14 + 2**8

WAYS: dict[str, Callable[[hpczero.Topology], Collectives]] = {
    "flat": hpczero.Flat,
    "messages": lambda topology: Hierarchical(topology, inside="messages"),
    "window": Hierarchical,
}


def alignments(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[hpczero.Topology], Collectives],
    nodes: list[int],
    dtype: torch.dtype,
) -> list[tuple[int, ...]]:
    """Of each sum of a reduction: where its blocks and its output begin, modulo what a device loads at once."""
    seen: list[tuple[int, ...]] = []

    def watched(blocks: list[Tensor], out: Tensor, **given: Any) -> None:
        if out.numel():
            seen.append(tuple(t.data_ptr() % VECTOR_NBYTES for t in (*blocks, out)))
        tree_sum(blocks, out, **given)

    monkeypatch.setattr(kernel, "tree_sum", watched)
    for name in ("EXCHANGE_BYTES", "LEAST_BYTES"):
        monkeypatch.setattr(footprint, name, SMALL)
    monkeypatch.setattr(MessageLevel, "most_nbytes", SMALL)
    topology = hpczero.Topology.create(comm, nodes)
    transport = make(topology)
    numel = SHARD_NUMEL * comm.size
    full = contribution(comm.rank, numel, dtype)
    out = torch.empty(SHARD_NUMEL)
    transport.settle()
    transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
    whole = expected_sum(topology, numel, dtype, torch.float32)
    parallel_assert(comm, out.numpy().tobytes() == own(topology, whole).tobytes())
    transport.close()
    topology.free()
    return seen


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_summed_in_chunks_is_aligned(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, way: str, apart: bool, dtype: torch.dtype
) -> None:
    nodes = [rank if apart else 0 for rank in range(comm.size)]
    seen = alignments(comm, monkeypatch, WAYS[way], nodes, dtype)
    at_once = way == "window" and not apart  # peers' memory is read where it is
    parallel_assert(comm, (len(seen) == 1) is at_once, f"{len(seen)} sums")
    parallel_assert(comm, not any(map(any, seen)), f"{seen}")


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", ["messages", "window"])
def test_what_is_carried_between_uneven_nodes_is_aligned(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, inside: Any, dtype: torch.dtype
) -> None:
    nodes = [int(rank == 0) for rank in range(comm.size)]
    make = partial(Uneven, inside=inside)
    seen = alignments(comm, monkeypatch, make, nodes, dtype)
    parallel_assert(comm, len(seen) > 3, f"{len(seen)} sums")
    parallel_assert(comm, not any(map(any, seen)), f"{seen}")
