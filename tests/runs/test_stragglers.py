"""Ranks that hold the others up are named with their hosts."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from hpczero.run.measured import Stragglers, slower_than_before, slower_than_others
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology


def test_only_ranks_below_the_threshold_are_slow_and_the_slowest_comes_first() -> None:
    assert slower_than_others([1.0, 1.0, 1.3, 1.5, 1.8]) == []  # the middle one is typical
    assert slower_than_others([1.0, 1.0, 1.0, 1.5, 2.0]) == [4, 3]
    assert slower_than_others([1.0, 2.0]) == [1]
    assert slower_than_others([0.001, 0.002]) == []  # a millisecond is nobody's business


def test_rank_is_compared_with_its_own_best() -> None:
    assert slower_than_before([1.0, 3.0, 1.4], [1.0, 1.0, 1.0]) == [1]


@pytest.mark.mpi(min_size=2)
def test_report_names_the_slow_rank_on_every_rank(comm: MPI.Intracomm, topology: Topology) -> None:
    slow = comm.size - 1
    stragglers = Stragglers(topology, every=3)
    reports = []
    for step in range(1, 7):
        stragglers.note(0.5 if comm.rank == slow else 0.1)
        reports.append(stragglers.report(step))
    expected = (
        f"straggler: rank {slow} on {socket.gethostname()} works 500.0 ms per step, others 100.0 ms "
        "(0.20 of their speed)"
    )
    parallel_assert(comm, reports == [[], [], [expected], [], [], [expected]], str(reports))


@pytest.mark.mpi(min_size=2)
def test_rank_that_becomes_slow_with_all_others_is_still_noticed(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    stragglers = Stragglers(topology, every=1)
    stragglers.note(0.1)
    first = stragglers.report(1)
    stragglers.note(0.4)
    second = stragglers.report(2)
    parallel_assert(comm, first == [], str(first))
    parallel_assert(comm, "(0.25 of its own speed)" in second[0], str(second))
    parallel_assert(comm, len(second) == min(comm.size, 8), str(second))


@pytest.mark.mpi
def test_nothing_is_gathered_where_it_is_turned_off(topology: Topology) -> None:
    stragglers = Stragglers(topology, every=0)
    if topology.is_root:  # not collective then
        stragglers.note(1.0)
        assert stragglers.report(100) == []
