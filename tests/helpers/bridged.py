"""The same program over the bridge and over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import hpczero.bridge
from tests.helpers.gloo import gloo

if TYPE_CHECKING:
    from mpi4py import MPI

# Before torch 2.13 the calls with one tensor for all ranks have other names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def bridge(
    comm: MPI.Intracomm, nodes: Sequence[int] | None = None, **options: Any
) -> Iterator[None]:
    """Context: the default process group is the bridge's over ``comm``. Collective."""
    hpczero.bridge.init(comm, nodes, **options)
    yield  # a test that fails leaves it: other ranks may be elsewhere
    dist.destroy_process_group()


def two_nodes(comm: MPI.Intracomm) -> list[int]:
    """Every other rank on one node, so that messages carry what shared memory does on one."""
    return [rank % 2 for rank in range(comm.size)]


def on_both(
    comm: MPI.Intracomm,
    program: Callable[[int, int], Sequence[Tensor]],
    nodes: Sequence[int] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``program(rank, size)`` returns over the bridge, and over gloo. Collective."""
    with bridge(comm, nodes):
        ours = [one.detach().clone() for one in program(comm.rank, comm.size)]
    with gloo(comm):
        theirs = [one.detach().clone() for one in program(comm.rank, comm.size)]
    return ours, theirs


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Other ones on every rank: random ones, small for integers."""
    generator = torch.Generator().manual_seed(100 + rank)
    found = torch.randn(tuple(shape), generator=generator)
    if dtype == torch.bool:
        return found > 0
    return (found * 3).to(dtype) if not dtype.is_complex else torch.complex(found, -found).to(dtype)
