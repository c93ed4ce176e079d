"""Whether all ranks have the same number: what each is told, and in how many messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from mpi4py import MPI

from hpczero.job.messages import is_same_number
from tests.helpers.world import World

pytestmark = pytest.mark.mpi


def test_all_ranks_are_told_alike_whether_their_numbers_are_the_same(world: World) -> None:
    group, ends = world.topology.world, (-(2**63), 2**63 - 1)
    same = [is_same_number(group, number) for number in (0, *ends)]
    world.check(same == [True] * 3, str(same))
    for odd in range(world.size):  # a rank that is behind or ahead, at each place
        for number in ends:
            found = is_same_number(group, number if world.rank == odd else 7)
            world.check(found == (world.size == 1), f"rank {odd} has {number}: {found}")
    distinct = is_same_number(group, world.rank)
    world.check(distinct == (world.size == 1), str(distinct))


def test_no_rank_sends_more_messages_than_the_logarithm_of_their_number(world: World) -> None:
    sent: list[int] = []

    class Counting(MPI.Intracomm):
        def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
            sent.append(dest)
            super().Send(buf, dest, tag)

        def Sendrecv(self, sendbuf: Any, dest: int, *args: Any, **named: Any) -> None:
            sent.append(dest)
            super().Sendrecv(sendbuf, dest, *args, **named)

    group = world.topology.world
    assert is_same_number(replace(group, comm=Counting(group.comm)), 3)
    world.check(len(sent) == math.ceil(math.log2(world.size)), f"sent to {sent}")


def test_no_collective_of_another_rank_is_taken_for_the_meeting(world: World) -> None:
    # A rank that an exception has put behind the others meets them only later.
    gathers = [world.topology.world.comm.Ibarrier() for _ in range(world.rank % 2)]
    late = [] if gathers else [world.topology.world.comm.Ibarrier]
    same = is_same_number(world.topology.world, 5)
    gathers += [begin() for begin in late]
    MPI.Request.Waitall(gathers)
    world.check(same)
