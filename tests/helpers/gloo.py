"""torch's own process group over the ranks of a communicator, for second opinions by stock torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from mpi4py import MPI

INTERFACE = "GLOO_SOCKET_IFNAME"


def skip_where_fsdp2_sums() -> None:
    """FSDP2 of torch 2.8 over gloo gives twice the mean of the gradients."""
    if torch.__version__.startswith("2.8."):
        pytest.skip("FSDP2 of torch 2.8 over gloo gives twice the mean of the gradients")


@contextmanager
def gloo(comm: MPI.Intracomm) -> Iterator[None]:
    """Context: the default process group is gloo's; it meets at a free port that rank 0 found. Collective."""
    if dist.is_initialized():  # by a zeroify before
        dist.destroy_process_group()
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = "lo"

    def store(port: int) -> TCPStore:
        first = comm.rank == 0
        return TCPStore("127.0.0.1", port, comm.size, is_master=first, wait_for_workers=False)

    mine = store(0) if comm.rank == 0 else None
    port = comm.bcast(mine.port if mine else None)
    dist.init_process_group("gloo", store=mine or store(port), rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        comm.Barrier()
        dist.destroy_process_group()
        if before is None:
            del os.environ[INTERFACE]
        else:
            os.environ[INTERFACE] = before
