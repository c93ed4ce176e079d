"""Standing requests: which calls have them, how many there are, and what a call without them leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.comm.algorithms import Blocks, MessageStep, PairwiseGather, Standing
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2, 3)
def test_pairs_describe_memory_that_recurs_once_and_hold_nothing_of_memory_that_does_not(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    held, described = [0], [0]

    class Counted(MPI.Prequest):
        def Free(self) -> None:
            held[0] -= 1
            super().Free()

    class Counting(MPI.Intracomm):
        def Send_init(self, *args: Any, **options: Any) -> MPI.Prequest:
            held[0] += 1
            described[0] += 1
            return Counted(super().Send_init(*args, **options))

    peers = comm.size - 1
    gather = PairwiseGather(Counting(comm))
    memory = torch.zeros(400 * comm.size)
    again = torch.zeros(comm.size)
    for turn in range(400):
        gather(Blocks.of(memory, turn * comm.size, 1, 1, comm.size))
        gather(Blocks.of(again, 0, 1, 1, comm.size))
    parallel_assert(comm, held[0] == peers, f"{held[0]} requests of {peers} peers")
    parallel_assert(comm, described[0] == 402 * peers, f"{described[0]} described")
    gather.free()
    parallel_assert(comm, held[0] == 0, f"{held[0]} requests after the end")


def to_nobody() -> list[MessageStep]:
    """Two requests to nobody."""
    from mpi4py import MPI

    nobody = [MPI.COMM_SELF.Send_init([b"", MPI.BYTE], MPI.PROC_NULL) for _ in range(2)]
    return [MessageStep(nobody, True)]


def stands(standing: Standing, key: int) -> bool:
    """One call, as an algorithm makes it; whether its requests were there."""
    if standing.get(key) is not None:
        return True
    gone = standing.displaced(key, 2)
    if gone is not None:
        standing.keep(key, to_nobody(), gone)
    return False


@pytest.mark.ranks(1)
def test_standing_requests_of_more_calls_than_there_is_room_for_are_partly_kept(
    comm: MPI.Intracomm,
) -> None:
    standing = Standing(most=10)
    turns = [sum(stands(standing, key) for key in range(8)) for _ in range(6)]
    assert turns == [0, 0, 5, 5, 5, 5]
    standing.free()


@pytest.mark.ranks(1)
def test_standing_requests_give_way_to_calls_that_recur_when_they_no_longer_do(
    comm: MPI.Intracomm,
) -> None:
    standing = Standing(most=10)
    for _ in range(3):
        before = [stands(standing, key) for key in range(5)]
    assert all(before)
    turns = [sum(stands(standing, key) for key in range(10, 15)) for _ in range(6)]
    assert turns[-1] == 5
    assert len(standing._kept) == 5
    standing.free()


@pytest.mark.ranks(1)
def test_standing_requests_forget_the_oldest_of_the_calls_that_they_have_seen(
    comm: MPI.Intracomm,
) -> None:
    standing = Standing(most_seen=20)
    for key in range(1000):
        stands(standing, key)
    assert len(standing._seen) == 20
    assert not standing._kept
    standing.free()
