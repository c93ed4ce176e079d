"""Transports of two levels: the suite on every shape of nodes, with messages and with shared memory inside a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import hpczero
from hpczero.comm import Hierarchical
from hpczero.comm.devices import DirectReach, StagedReach
from hpczero.comm.rails import AlgorithmChoice, Selection
from tests.comm.conduct import makes
from tests.comm.suite import CollectivesSuite

if TYPE_CHECKING:
    from mpi4py import MPI


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
    make = makes(Hierarchical, inside="messages")


@pytest.mark.ranks(2, 3, 4)
class TestSharedMemory(RectangularSuite):
    make = makes(Hierarchical)


@pytest.mark.ranks(3, 4)
class TestMessagesInTheBackground(RectangularSuite):
    make = makes(Hierarchical, inside="messages", overlap=True)


@pytest.mark.ranks(4)
class TestSharedMemoryInTheBackground(RectangularSuite):
    make = makes(Hierarchical, overlap=True)


@pytest.mark.ranks(4)
class TestDoublingAndPairs(RectangularSuite):
    make = makes(
        Hierarchical, selection=Selection.parse("all_gather=doubling,reduce_scatter=pairwise")
    )


@pytest.mark.ranks(4)
class TestLibraryAndShortRounds(RectangularSuite):
    """Rounds of 24 bytes, so that the sizes of the suite take several."""

    gathers = (AlgorithmChoice("pairwise"), AlgorithmChoice("library", from_nbytes=20))
    exchanges = (
        AlgorithmChoice("pairwise", chunk_nbytes=24),
        AlgorithmChoice("library", 24, from_nbytes=2000),
    )
    make = makes(Hierarchical, selection=Selection(gathers, exchanges))


@pytest.mark.ranks(2, 3, 4)
class TestPeersMemory(RectangularSuite):
    make = makes(Hierarchical, inside="ipc")


@pytest.mark.ranks(2, 4)
class TestPeersMemoryOfALateDevice(RectangularSuite):
    """Everything goes on in the background, also on one node."""

    make = makes(Hierarchical, StagedReach, inside="ipc", overlap=True)


@pytest.mark.ranks(4)
class TestMessagesOfALateDevice(RectangularSuite):
    make = makes(
        Hierarchical,
        StagedReach,
        inside="messages",
        selection=Selection.parse("all_gather=ring,reduce_scatter=pairwise"),
    )


@pytest.mark.ranks(4)
class TestMessagesWithDeviceMemory(RectangularSuite):
    make = makes(Hierarchical, DirectReach, inside="messages", overlap=True)
