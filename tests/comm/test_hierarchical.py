"""Transports of two levels: the suite on every shape of nodes, with messages and with shared memory inside a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import hpczero
from hpczero.comm import Hierarchical
from hpczero.comm.devices import DirectReach, StagedReach
from hpczero.comm.rails import AlgorithmChoice, Selection
from tests.comm.suite import CollectivesSuite
from tests.helpers.late import LateAccelerator

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology


class RectangularSuite(CollectivesSuite):
    """The suite on nodes of equal size."""

    @pytest.fixture(
        params=[
            "one node",
            pytest.param("nodes of one rank", marks=pytest.mark.ranks(3, 4)),
            pytest.param("block", marks=pytest.mark.ranks(4)),
            pytest.param("cyclic", marks=pytest.mark.ranks(4)),
        ]
    )
    def topology(
        self, comm: MPI.Intracomm, request: pytest.FixtureRequest
    ) -> Iterator[hpczero.Topology]:
        size = comm.size
        nodes = {
            "one node": [0] * size,
            "nodes of one rank": list(range(size)),
            "block": [2 * rank // size for rank in range(size)],
            "cyclic": [rank % 2 for rank in range(size)],
        }
        topology = hpczero.Topology.create(comm, nodes[request.param])
        yield topology
        topology.free()


@pytest.mark.ranks(2, 3, 4)
class TestMessages(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        return Hierarchical(topology, inside="messages", **options)


@pytest.mark.ranks(2, 3, 4)
class TestSharedMemory(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        return Hierarchical(topology, **options)


@pytest.mark.ranks(3, 4)
class TestMessagesInTheBackground(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        return Hierarchical(topology, inside="messages", overlap=True, **options)


@pytest.mark.ranks(4)
class TestSharedMemoryInTheBackground(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        return Hierarchical(topology, overlap=True, **options)


@pytest.mark.ranks(4)
class TestDoublingAndPairs(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        selection = Selection.parse("all_gather=doubling,reduce_scatter=pairwise")
        return Hierarchical(topology, selection=selection, **options)


@pytest.mark.ranks(4)
class TestLibraryAndShortRounds(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        # rounds of 24 bytes, so that the sizes of the suite take several
        exchanges = (
            AlgorithmChoice("pairwise", chunk_nbytes=24),
            AlgorithmChoice("library", 24, from_nbytes=2000),
        )
        selection = Selection(
            (AlgorithmChoice("pairwise"), AlgorithmChoice("library", from_nbytes=20)), exchanges
        )
        return Hierarchical(topology, selection=selection, **options)


@pytest.mark.ranks(2, 3, 4)
class TestPeersMemory(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        return Hierarchical(topology, inside="ipc", **options)


@pytest.mark.ranks(2, 4)
class TestPeersMemoryOfALateDevice(RectangularSuite):
    """Everything goes on in the background, also on one node."""

    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        reach = StagedReach(LateAccelerator())
        return Hierarchical(topology, inside="ipc", overlap=True, reach=reach, **options)


@pytest.mark.ranks(4)
class TestMessagesOfALateDevice(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        selection = Selection.parse("all_gather=ring,reduce_scatter=pairwise")
        reach = StagedReach(LateAccelerator())
        return Hierarchical(
            topology, inside="messages", reach=reach, selection=selection, **options
        )


@pytest.mark.ranks(4)
class TestMessagesWithDeviceMemory(RectangularSuite):
    @staticmethod
    def make(topology: Topology, **options: Any) -> Hierarchical:
        reach = DirectReach(LateAccelerator())
        return Hierarchical(topology, inside="messages", overlap=True, reach=reach, **options)
