"""Whether all ranks have the same number: what each is told, and in how many messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from mpi4py import MPI

from hpczero import Topology
from hpczero.job.messages import is_same_number
from tests.helpers.parallel import parallel_assert

pytestmark = pytest.mark.mpi


def test_all_ranks_are_told_alike_whether_their_numbers_are_the_same(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    world, ends = topology.world, (-(2**63), 2**63 - 1)
    same = [is_same_number(world, number) for number in (0, *ends)]
    parallel_assert(comm, same == [True] * 3, str(same))
    for odd in range(comm.size):  # a rank that is behind or ahead, at each place
        for number in ends:
            found = is_same_number(world, number if comm.rank == odd else 7)
            parallel_assert(comm, found == (comm.size == 1), f"rank {odd} has {number}: {found}")
    distinct = is_same_number(world, comm.rank)
    parallel_assert(comm, distinct == (comm.size == 1), str(distinct))


def test_no_rank_sends_more_messages_than_the_logarithm_of_their_number(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    sent: list[int] = []

    class Counting(MPI.Intracomm):
        def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
            sent.append(dest)
            super().Send(buf, dest, tag)

        def Sendrecv(self, sendbuf: Any, dest: int, *args: Any, **named: Any) -> None:
            sent.append(dest)
            super().Sendrecv(sendbuf, dest, *args, **named)

    assert is_same_number(replace(topology.world, comm=Counting(topology.world.comm)), 3)
    parallel_assert(comm, len(sent) == math.ceil(math.log2(comm.size)), f"sent to {sent}")


def test_no_collective_of_another_rank_is_taken_for_the_meeting(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    # A rank that an exception has put behind the others meets them only later.
    gathers = [topology.world.comm.Ibarrier() for _ in range(comm.rank % 2)]
    late = [] if gathers else [topology.world.comm.Ibarrier]
    same = is_same_number(topology.world, 5)
    gathers += [begin() for begin in late]
    MPI.Request.Waitall(gathers)
    parallel_assert(comm, same)
