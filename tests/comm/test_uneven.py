"""Nodes with different numbers of ranks: the suite with messages and shared memory inside, and what crosses between."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typing_extensions import override

import hpczero
from hpczero.comm import Flat, Hierarchical, Uneven, choose
from hpczero.comm.devices import DirectReach, StagedReach
from hpczero.comm.rails import AlgorithmChoice, Selection
from hpczero.errors import ConfigError, TopologyError
from hpczero.memory.buffers import Use
from tests.comm.conduct import makes, on_nodes
from tests.comm.suite import CollectivesSuite, bits, contribution, own, shard_owners
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Collectives, Topology

NODES = {  # by number of ranks: node of each
    3: {"block": [0, 0, 1], "apart": [0, 1, 0]},
    4: {"block": [0, 0, 0, 1], "first alone": [0, 1, 1, 1], "three": [0, 1, 1, 2]},
    5: {"block": [0, 0, 1, 1, 2], "apart": [0, 1, 2, 0, 1], "large": [0, 0, 0, 0, 1]},
}
PLACEMENTS = {
    name: [size for size in NODES if name in NODES[size]]
    for name in ("block", "apart", "first alone", "three", "large")
}


def uneven(name: str, size: int) -> list[int]:
    """Of "one node", for which tests ask that need one layout only, too."""
    return NODES[size]["block" if name == "one node" else name]


class UnevenSuite(CollectivesSuite):
    """The suite on nodes that are never equal."""

    topology = on_nodes(uneven, PLACEMENTS)

    @override
    def test_accounts_are_exact(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        """What each rank hands to MPI, by receiver, is what the accounts say; to a node an element goes once."""
        world = topology.world
        node_of = {rank: g for g, ranks in enumerate(world.nodes) for rank in ranks}
        nodes, mine = world.num_nodes, world.local_size
        sent = watch(transport)
        for dtype, size in ((torch.bfloat16, 7), (torch.float32, 640), (torch.float32, 1000)):
            item = dtype.itemsize
            numel = size * comm.size
            before = dict(transport.stats.sent_nbytes)
            whole = torch.zeros(numel, dtype=dtype)
            for operation, nodes_nbytes in (
                ("all_gather", (nodes - 1) * mine * size * item),
                ("reduce_scatter", (comm.size - mine) * size * 4),
            ):
                sent.clear()
                if operation == "all_gather":
                    transport.all_gather(whole, name="u").wait()
                else:
                    transport.reduce_scatter(whole, torch.zeros(size), scale=1.0, name="u").wait()
                counted = transport.stats.sent_nbytes[operation] - before.get(operation, 0)
                said = f"{operation} of {size} x {dtype}: {dict(sent)}, counted {counted}"
                parallel_assert(comm, sum(sent.values()) == counted, said)
                away = sum(n for to, n in sent.items() if node_of[to] != world.node_index)
                of_node = world.node.allreduce(away)
                parallel_assert(comm, of_node == nodes_nbytes, f"{said}; node {of_node}")


def watch(transport: Any) -> Counter[int]:
    """Bytes that this rank hands to MPI from now on, by rank of the group that gets them."""
    from mpi4py import MPI

    sent: Counter[int] = Counter()
    ranks = {"node": transport.group.nodes[transport.group.node_index]}

    class Watched(MPI.Intracomm):
        where = ""

        def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
            sent[ranks[self.where][dest] if self.where else dest] += len(buf[0])
            return super().Isend(buf, dest, tag)

    class Inside(Watched):
        where = "node"

    for line in (transport._rails._gathered, transport._rails._reductions):
        line.comm = Watched(line.comm)
    level = transport._node
    level = getattr(level, "_messages", level)
    level._line.comm = Inside(level._line.comm)
    return sent


@pytest.mark.ranks(3, 4, 5)
class TestMessages(UnevenSuite):
    make = makes(Uneven, inside="messages")


@pytest.mark.ranks(3, 4, 5)
class TestSharedMemory(UnevenSuite):
    make = makes(Uneven)


@pytest.mark.ranks(3, 4)
class TestMessagesInTheBackground(UnevenSuite):
    make = makes(Uneven, inside="messages", overlap=True)


@pytest.mark.ranks(4, 5)
class TestSharedMemoryInTheBackground(UnevenSuite):
    make = makes(Uneven, overlap=True)


@pytest.mark.ranks(4, 5)
class TestShortRounds(UnevenSuite):
    """Rounds of 24 and 512 bytes, so that the sizes of the suite take several."""

    large_numel = 2**12 + 3  # a thousand rounds
    gathers = (AlgorithmChoice("pairwise", 20),)
    exchanges = (AlgorithmChoice("pairwise", 24), AlgorithmChoice("pairwise", 512, from_nbytes=200))
    make = makes(Uneven, selection=Selection(gathers, exchanges))


@pytest.mark.ranks(4)
class TestMessagesOfALateDevice(UnevenSuite):
    make = makes(Uneven, StagedReach, inside="messages")


@pytest.mark.ranks(4)
class TestMessagesWithDeviceMemory(UnevenSuite):
    make = makes(Uneven, DirectReach, inside="messages", overlap=True)


pytestmark = pytest.mark.mpi


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("inside", ["messages", "window"])
@pytest.mark.parametrize("node_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_bits_of_flat_in_any_dtype_and_round(
    comm: MPI.Intracomm, inside: Any, node_dtype: torch.dtype
) -> None:
    for nodes in NODES[comm.size].values():
        topology = hpczero.Topology.create(comm, nodes)
        flat = Flat(topology, node_dtype=node_dtype)
        transport = Uneven(
            topology, inside=inside, node_dtype=node_dtype, overlap=True, chunk_nbytes=520
        )
        gradients = []
        wanted = list(product((torch.float32, torch.bfloat16), (3, 65, 1027)))
        for dtype, size in wanted:
            numel = size * comm.size
            gradients.append(transport.allocate(numel, dtype, category="c", use=Use.REDUCE))
            gradients[-1].release()
        transport.settle()
        for (dtype, size), gradient in zip(wanted, gradients, strict=True):
            gradient.take()
            gradient.tensor.copy_(contribution(comm.rank, size * comm.size, dtype))
            found, expected = torch.ones(size), torch.ones(size)
            for way, out in ((transport, found), (flat, expected)):
                given: dict[str, Any] = {"scale": 1 / 3, "accumulate": True, "name": "u"}
                way.reduce_scatter(gradient.tensor, out, **given).wait()
            gradient.release()
            parallel_assert(comm, bits(found) == bits(expected), f"{nodes}, {size} x {dtype}")
        transport.close()
        flat.close()
        topology.free()


@pytest.mark.ranks(4)
def test_a_node_keeps_one_copy_of_whole_parameters_however_it_divides(comm: MPI.Intracomm) -> None:
    """Seven elements of four ranks divide neither by three nor by pages."""
    topology = hpczero.Topology.create(comm, [0, 0, 0, 1])
    transport = Uneven(topology)
    kept = transport.allocate(28, torch.bfloat16, category="k", use=Use.GATHER, keep=True)
    passing = transport.allocate(28, torch.bfloat16, category="p", use=Use.GATHER)
    transport.settle()
    passing.take()
    for buffer in (kept, passing):
        own(topology, buffer.tensor)[:] = contribution(comm.rank, 7, torch.bfloat16)
        transport.all_gather(buffer.tensor, name="u").wait()
        whole = torch.cat([contribution(r, 7, torch.bfloat16) for r in shard_owners(topology)])
        parallel_assert(comm, bits(buffer.tensor) == bits(whole))
    held = dict(transport.memory.current)
    each = 19 if comm.rank < 3 else 56  # of 56 bytes
    parallel_assert(comm, (held["k"], held["p"]) == (each, each), f"{held}")
    transport.barrier()
    passing.release()
    transport.close()
    topology.free()


@pytest.mark.ranks(3)
def test_what_needs_equal_nodes_is_refused_by_name_on_all_ranks(comm: MPI.Intracomm) -> None:
    topology = hpczero.Topology.create(comm, [0, 0, 1])
    said = r"different numbers of ranks \(1 to 2\), and "
    for message, make in {
        f"{said}ranks read each other's device memory": lambda: Uneven(topology, inside="ipc"),
        f"{said}a secondary copy": lambda: choose(topology, secondary=True),
        "no rails; use Uneven": lambda: Hierarchical(topology),
    }.items():
        raises_on_all(comm, TopologyError, message, make)
    said = "got doubling, expected pairwise: nodes have 1, 2 ranks"
    raises_on_all(comm, ConfigError, said, choose, topology, algorithms="all_gather=doubling")
    topology.free()
    even = hpczero.Topology.create(comm, [0, 1, 2])
    raises_on_all(comm, TopologyError, r"all 3 node\(s\) have 1 rank\(s\)", lambda: Uneven(even))
    said = "doubling does not work between 3 nodes"
    raises_on_all(comm, ConfigError, said, choose, even, algorithms="all_gather=doubling")
    even.free()
