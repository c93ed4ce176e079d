"""Transports of two levels: the suite on every shape of nodes, with messages and with shared memory inside a node."""

from __future__ import annotations

import pytest

from hpczero.comm import Hierarchical
from hpczero.comm.devices import DirectReach, StagedReach
from hpczero.comm.rails import AlgorithmChoice, Selection
from tests.comm.conduct import makes, on_nodes
from tests.comm.suite import CodesSuite

# Numbers of ranks, where not any.
RANKS = {"one node": (), "nodes of one rank": (3, 4), "block": (4,), "cyclic": (4,)}


def equal(name: str, size: int) -> list[int]:
    """Nodes of equal size."""
    return {
        "one node": [0] * size,
        "nodes of one rank": list(range(size)),
        "block": [2 * rank // size for rank in range(size)],
        "cyclic": [rank % 2 for rank in range(size)],
    }[name]


class RectangularSuite(CodesSuite):
    topology = on_nodes(equal, RANKS)


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
    selection = Selection.parse("all_gather=doubling,reduce_scatter=pairwise")
    make = makes(Hierarchical, selection=selection)


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
    selection = Selection.parse("all_gather=ring,reduce_scatter=pairwise")
    make = makes(Hierarchical, StagedReach, inside="messages", selection=selection)


@pytest.mark.ranks(4)
class TestMessagesWithDeviceMemory(RectangularSuite):
    make = makes(Hierarchical, DirectReach, inside="messages", overlap=True)
