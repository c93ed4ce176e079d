"""The flat transport: the suite, the suite again with chunks so small that every buffer takes several, its scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.comm.devices import StagedReach
from hpczero.plan.footprint import EXCHANGE_BYTES
from tests.comm.conduct import makes
from tests.comm.suite import CodesSuite, contribution, expected_sum, own
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology


class TestFlat(CodesSuite):
    make = makes(hpczero.Flat)


@pytest.mark.ranks(3, 4)
class TestFlatInSmallChunks(CodesSuite):
    make = makes(hpczero.Flat, chunk_nbytes=20)

    def test_large_buffers(self, comm: MPI.Intracomm) -> None:  # type: ignore[override]
        """Not with 20 bytes at a time."""


@pytest.mark.ranks(3, 4)
class TestFlatOverALateDevice(CodesSuite):
    make = makes(hpczero.Flat, StagedReach)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_exchange_buffer_stays_within_its_bound(comm: MPI.Intracomm, topology: Topology) -> None:
    transport = hpczero.Flat(topology)
    shard_numel = EXCHANGE_BYTES // 4 // comm.size + 1001  # one round and a bit
    full = contribution(comm.rank, shard_numel * comm.size, torch.float32)
    out = torch.empty(shard_numel)
    transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
    held, peak = transport.exchange_nbytes, transport.memory.peak["exchange"]
    parallel_assert(comm, 0.99 * EXCHANGE_BYTES < held <= peak <= EXCHANGE_BYTES, f"{held} {peak}")
    whole = expected_sum(topology, full.numel(), torch.float32, torch.float32)
    parallel_assert(comm, out.numpy().tobytes() == own(topology, whole).tobytes())
    transport.close()
    parallel_assert(comm, transport.exchange_nbytes == 0)
