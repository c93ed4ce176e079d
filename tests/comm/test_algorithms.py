"""Every algorithm moves the same bytes, whatever the number of ranks, the size of blocks and their stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from hpczero.comm.algorithms import (
    EXCHANGES,
    GATHERS,
    Blocks,
    Exchange,
    Gather,
    PairwiseExchange,
    PairwiseGather,
    Standing,
)
from hpczero.comm.devices import DirectReach, HostReach, Reach, StagedReach
from hpczero.plan import footprint
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SIZES = ((1, 1), (5, 5), (5, 9), (700, 701))  # elements of a block, and from one block to the next
GAP = -1.0


def block(sender: int, receiver: int, numel: int) -> Tensor:
    """What ``sender`` has for ``receiver``; other values for each pair."""
    return torch.arange(numel, dtype=torch.float32) + 10_000 * sender + 1_000 * receiver


REACHES: dict[str, Callable[[], Reach]] = {
    "host": HostReach,
    "direct": lambda: DirectReach(LateAccelerator()),
    "staged": lambda: StagedReach(LateAccelerator()),
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("chunk_nbytes", [12, 2**20])
def test_gather_fills_every_block_from_its_owner(
    comm: MPI.Intracomm, kind: type[Gather], chunk_nbytes: int, reach: str
) -> None:
    if kind.fits(comm.size):
        check_gather(comm, kind, REACHES[reach](), chunk_nbytes)


def check_gather(comm: MPI.Intracomm, kind: type[Gather], reach: Reach, chunk_nbytes: int) -> None:
    """Blocks of several sizes and strides, each filled from its owner; nothing between them is touched."""
    gather = reach.gather(kind, comm, chunk_nbytes=chunk_nbytes)
    for numel, stride in SIZES:
        buffer = torch.full((3 + stride * comm.size,), GAP)
        expected = buffer.clone()
        for rank in range(comm.size):
            expected[3 + rank * stride :][:numel] = block(rank, 0, numel)
        mine = slice(3 + comm.rank * stride, 3 + comm.rank * stride + numel)
        buffer[mine] = expected[mine]
        gather(Blocks.of(buffer, 3, numel, stride, comm.size))
        parallel_assert(comm, torch.equal(buffer, expected), f"{numel} of {stride}")
    gather.free()


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("steps", [1, 2])
def test_pairs_of_several_peers_at_a_time_move_the_same_bytes(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, steps: int, reach: str
) -> None:
    monkeypatch.setattr(footprint, "STEPS", steps)
    for _ in range(2):
        check_gather(comm, PairwiseGather, REACHES[reach](), chunk_nbytes=12)
        check_exchange(comm, PairwiseExchange, REACHES[reach]())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_pairs_with_room_for_some_requests_move_the_same_bytes(
    comm: MPI.Intracomm, room: int
) -> None:
    gather = PairwiseGather(comm)
    gather._steps._standing = Standing(most=2 * (comm.size - 1) * room)
    buffers = [torch.full((comm.size,), GAP) for _ in range(4)]
    turns = [[0, 1, 2]] * 4 + [[3, 3, 0]] * 4
    for turn, places in enumerate(turns):
        for place in places:
            buffer = buffers[place]
            buffer[comm.rank] = float(100 * turn + 10 * place + comm.rank)
            gather(Blocks.of(buffer, 0, 1, 1, comm.size))
            expected = torch.arange(comm.size) + 100.0 * turn + 10.0 * place
            parallel_assert(comm, torch.equal(buffer, expected), f"{buffer} in turn {turn}")
    parallel_assert(comm, gather.messages == 24 * (comm.size - 1))
    gather.free()


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kind", EXCHANGES)
def test_exchange_brings_each_rank_its_block_of_all_others(
    comm: MPI.Intracomm, kind: type[Exchange], reach: str
) -> None:
    check_exchange(comm, kind, REACHES[reach]())


def check_exchange(comm: MPI.Intracomm, kind: type[Exchange], reach: Reach) -> None:
    exchange = reach.exchange(kind, comm)
    for numel, stride in SIZES:
        check_blocks(comm, exchange, numel, stride)
    exchange.free()


def check_blocks(comm: MPI.Intracomm, exchange: Exchange, numel: int, stride: int) -> None:
    """Each is prepared once; every rank gets its own of all others."""
    send = torch.full((stride * comm.size,), GAP)
    receive = torch.full((numel * comm.size,), GAP)
    prepared: list[int] = []

    def prepare(first: int, count: int) -> None:
        for index in range(first, first + count):
            prepared.append(index)
            send[index * stride :][:numel] = block(comm.rank, index, numel)

    sent = Blocks.of(send, 0, numel, stride, comm.size)
    exchange(sent, Blocks.of(receive, 0, numel, numel, comm.size), prepare=prepare)
    exchange.finish()
    parallel_assert(comm, sorted(prepared) == list(range(comm.size)), str(prepared))
    for rank in range(comm.size):
        found = receive[rank * numel :][:numel]
        right = rank == comm.rank or torch.equal(found, block(rank, comm.rank, numel))
        parallel_assert(comm, right, f"block of rank {rank}, {numel} of {stride}")
