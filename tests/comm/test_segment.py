"""Shared memory of a node: seen by all, gone afterwards, refused where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hpczero.comm import inside
from hpczero.comm.inside import PAGE, Counters, Segment
from hpczero.errors import CommError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def pages_of(memory: Segment) -> int:
    """Bytes behind the segment, by the file system's count."""
    return os.fstat(memory.file).st_blocks * 512


def test_what_one_rank_writes_all_read(comm: MPI.Intracomm) -> None:
    shared = Segment.create(comm, 4 * comm.size, "a test")
    values = shared.bytes[: 4 * comm.size].view(torch.float32)
    parallel_assert(comm, not values.any(), "memory is zero at first")
    values[comm.rank] = comm.rank + 0.5
    comm.Barrier()
    parallel_assert(comm, values.tolist() == [rank + 0.5 for rank in range(comm.size)])


def test_nothing_is_left_behind_even_while_it_is_used(comm: MPI.Intracomm) -> None:
    shared = Segment.create(comm, 100, "a test")
    left = list(Path("/dev/shm").glob(f"hpczero-{os.getpid()}-*"))
    parallel_assert(comm, not left and shared.bytes.numel() == PAGE, str(left))


def test_memory_lives_as_long_as_a_tensor_on_it(comm: MPI.Intracomm) -> None:
    shared = Segment.create(comm, 100, "a test")
    view = shared.bytes[:10]
    view.fill_(7)
    del shared
    parallel_assert(comm, view.tolist() == [7] * 10)


def test_pages_come_when_they_are_claimed_and_go_when_they_are_given_back(
    comm: MPI.Intracomm,
) -> None:
    shared = Segment.create(comm, 10 * PAGE * comm.size, "a test")
    start = 10 * PAGE * comm.rank
    parallel_assert(comm, pages_of(shared) == 0)
    comm.Barrier()
    shared.claim(start, start + 8 * PAGE)
    comm.Barrier()
    parallel_assert(comm, pages_of(shared) == 8 * PAGE * comm.size, str(pages_of(shared)))
    shared.bytes[start : start + 8 * PAGE] = 3
    comm.Barrier()
    shared.give_back(start + 1, start + 8 * PAGE - 1)  # whole pages only
    comm.Barrier()
    parallel_assert(comm, pages_of(shared) == 2 * PAGE * comm.size, str(pages_of(shared)))
    kept = shared.bytes[start : start + 8 * PAGE].view(8, PAGE)[:, 0].tolist()
    parallel_assert(comm, kept == [3, 0, 0, 0, 0, 0, 0, 3], str(kept))


def test_a_segment_that_is_not_mapped_has_pages_all_the_same(comm: MPI.Intracomm) -> None:
    shared = Segment.create(comm, 4 * PAGE, "a test", mapped=False)
    comm.Barrier()
    if comm.rank == 0:
        shared.claim(0, 3 * PAGE)
    comm.Barrier()
    parallel_assert(comm, pages_of(shared) == 3 * PAGE and not shared.bytes.numel())
    comm.Barrier()
    if comm.rank == 0:
        shared.give_back(0, 2 * PAGE)
    comm.Barrier()
    parallel_assert(comm, pages_of(shared) == PAGE, str(pages_of(shared)))


def test_more_than_the_machine_has_is_an_error_not_a_crash(comm: MPI.Intracomm) -> None:
    shared = Segment.create(comm, 2**44, "a test")
    with pytest.raises(CommError, match=r"more bytes of /dev/shm: .*; free some of it"):
        shared.claim(0, 2**44)
    shared.give_back(0, 2**44)
    comm.Barrier()
    parallel_assert(comm, pages_of(shared) == 0)


@pytest.mark.parametrize("everywhere", [True, False], ids=["none", "not of a container"])
def test_memory_that_a_rank_does_not_see_is_refused_on_every_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    if everywhere or comm.rank == comm.size - 1:
        monkeypatch.setattr(inside, "FOLDER", Path("/nowhere"))
    said = "no shared memory for a test: /nowhere/hpczero-.*: No such file or directory"
    raises_on_all(comm, CommError, said, Segment.create, comm, 1, "a test")


def test_counters_wait_for_the_last_rank(comm: MPI.Intracomm) -> None:
    counters = Counters(comm, 3)
    shared = Segment.create(comm, 8 * comm.size, "a test")
    values = shared.bytes[: 8 * comm.size].view(torch.int64)
    wrong = []
    for turn in range(1, 300):
        values[comm.rank] = turn
        counters.publish(0, turn)
        counters.wait(0, turn)
        if values.tolist() != [turn] * comm.size:
            wrong.append(turn)
        counters.publish(2, turn)
        counters.wait(2, turn)
    parallel_assert(comm, not wrong, str(wrong[:5]))
    parallel_assert(comm, counters.read(0, 1) == 0)
    counters.free()
