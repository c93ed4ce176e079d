"""Which transport a topology gets, and what is said where the asked one cannot work."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.accelerator import Attached, host
from hpczero.comm import choose, inside
from hpczero.comm.uneven import carriers_of
from hpczero.errors import CommError, ConfigError, TopologyError
from hpczero.memory.buffers import Use
from hpczero.plan.footprint import Named, footprint_of
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = pytest.mark.mpi


def kind_of(topology: Topology, transport: str = "auto", **options: Any) -> str:
    chosen = choose(topology, transport, **options)
    said = chosen.describe()
    chosen.close()
    return said


CHOSEN = [  # nodes, transport, how it describes itself
    ([0], "auto", "flat"),
    ([0, 0], "auto", "shared memory on one node"),
    ([0, 1, 2], "auto", "messages inside nodes; between nodes all-gather pairwise"),
    ([0, 0, 1], "auto", "shared memory inside nodes; between nodes of 1 to 2 ranks all-gather p"),
    ([0, 0, 1], "hierarchical", "messages inside nodes; between nodes of 1 to 2"),
    ([0, 0, 1, 1], "auto", "shared memory inside nodes; between nodes all-gather pairwise; reduce"),
]


@pytest.mark.parametrize(
    ("nodes", "transport", "said"),
    [pytest.param(*case, marks=pytest.mark.ranks(len(case[0]))) for case in CHOSEN],
)
def test_nodes_decide_the_transport(
    comm: MPI.Intracomm,
    nodes: list[int],
    transport: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topology = hpczero.Topology.create(comm, nodes)
    with caplog.at_level(logging.WARNING, "hpczero.comm"):
        found = kind_of(topology, transport)
    parallel_assert(comm, found.startswith(said), found)
    parallel_assert(comm, not caplog.records)
    topology.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("nodes", ["one", "halves", "one apart"])
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_a_transport_holds_what_the_plan_says_of_its_name(
    comm: MPI.Intracomm, transport: Named, nodes: str
) -> None:
    ranks = range(comm.size)
    placed = {
        "one": [0 for _ in ranks],
        "halves": [2 * rank // comm.size for rank in ranks],
        "one apart": [int(rank == 1) for rank in ranks],
    }
    topology = hpczero.Topology.create(comm, placed[nodes])
    chosen, carriers = choose(topology, transport), carriers_of(topology.shard)
    given: dict[str, Any] = {"local_size": topology.local_size, "carriers": carriers}
    found, expected = chosen.footprint, footprint_of(transport, ranks=comm.size, **given)
    if carriers is None:
        found = dataclasses.replace(found, round_nbytes=expected.round_nbytes)
    chosen.close()
    topology.free()
    parallel_assert(comm, found == expected, f"{found}, expected {expected}")


@pytest.mark.ranks(3)
def test_devices_on_uneven_nodes_exchange_messages_and_say_so_once(
    comm: MPI.Intracomm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_GPU_AWARE", "0")
    topology = hpczero.Topology.create(comm, [0, 0, 1])
    with caplog.at_level(logging.WARNING, "hpczero.comm"):
        said = kind_of(topology, accelerator=LateAccelerator())
    parallel_assert(comm, said.startswith("messages (device memory through the host) inside"), said)
    told = [record.getMessage() for record in caplog.records]
    parallel_assert(comm, len(told) == int(comm.rank == 0), f"{told}")
    parallel_assert(comm, all("same number of ranks on every node" in text for text in told))
    said, device = "read each other's device memory on equal nodes only", LateAccelerator()
    raises_on_all(comm, TopologyError, said, choose, topology, "ipc", accelerator=device)
    topology.free()


@pytest.mark.ranks(2)
def test_without_shared_memory_auto_takes_messages_and_window_is_refused(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == 1:
        monkeypatch.setattr(inside, "FOLDER", Path("/nowhere"))
    parallel_assert(comm, kind_of(topology).startswith("flat"))
    refused(comm, CommError, "no shared memory for .*: /nowhere", topology, transport="window")


def refused(
    comm: MPI.Intracomm, kind: type[Exception], said: str, topology: Topology, **options: Any
) -> None:
    """``zeroify`` with these options is."""
    model = MLP()
    options["topology"] = topology
    raises_on_all(comm, kind, said, lambda: hpczero.zeroify(model, adamw(model), **options))


def described(**options: Any) -> str:
    """The transport that ``zeroify`` gets with these options."""
    model = MLP()
    with zeroified(model, adamw(model), **options) as sharding:
        return sharding.collectives.describe()


@pytest.mark.ranks(2)
def test_algorithms_may_be_named(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = hpczero.Topology.create(comm, [0, 1])
    said = described(topology=topology, transport="window", algorithms="all_gather=doubling")
    parallel_assert(comm, "all-gather doubling; reduce-scatter pairwise (given)" in said, said)
    monkeypatch.setenv("HPCZERO_ALGORITHMS", "reduce_scatter=library")
    said = described(topology=topology)
    parallel_assert(comm, "all-gather pairwise; reduce-scatter library (given)" in said, said)
    monkeypatch.setenv("HPCZERO_ALGORITHMS", "ring")
    refused(comm, ConfigError, "algorithms: got 'ring'", topology)
    topology.free()


@pytest.mark.ranks(2)
def test_unknown_name_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    said = "transport: got 'nccl', expected one of auto, flat, hierarchical, window"
    refused(comm, ConfigError, said, topology, transport="nccl")


@pytest.mark.ranks(2)
def test_environment_says_what_auto_means(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_TRANSPORT", "hierarchical")
    said = described(topology=topology)
    parallel_assert(comm, said == "messages on one node", said)


@pytest.mark.ranks(2)
def test_ranks_that_share_a_device_read_each_others_memory(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_GPU_AWARE", "0")
    said = kind_of(topology, accelerator=LateAccelerator())
    expected = "peers' memory of devices on one node, while the model computes"
    parallel_assert(comm, said == expected, said)
    said, device = "window shares memory of the host", LateAccelerator()
    raises_on_all(comm, ConfigError, said, choose, topology, "window", accelerator=device)


@pytest.mark.ranks(2)
def test_where_peers_cannot_be_mapped_auto_takes_messages(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_GPU_AWARE", "0")
    if comm.rank == 1:
        monkeypatch.setattr(host, "FOLDER", Path("/nowhere"))
    said = kind_of(topology, accelerator=LateAccelerator())
    parallel_assert(comm, said.startswith("flat"), said)
    refused(comm, CommError, "/nowhere", topology, transport="ipc", device=LateAccelerator())


class UnreachablePeer(LateAccelerator):
    """The last rank cannot map the one before it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.mapped: list[Attached] = []
        self._rank = rank

    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        if self._rank == 2 and self.mapped:
            raise CommError("the memory of rank 1 cannot be mapped")
        self.mapped.append(super().attach(ticket, nbytes))
        return self.mapped[-1]


@pytest.mark.ranks(3)
def test_where_one_rank_cannot_map_its_peers_nobody_keeps_them_mapped(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    accelerator = UnreachablePeer(comm.rank)
    transport = choose(topology, "ipc", accelerator=accelerator)
    transport.allocate(12, torch.float32, category="c", use=Use.REDUCE)
    raises_on_all(comm, CommError, "rank 1 cannot be mapped", transport.settle)
    parallel_assert(comm, len(accelerator.mapped) == (1 if comm.rank == 2 else 2))
    transport.close()
    left = [attached.memory.numel() for attached in accelerator.mapped]
    parallel_assert(comm, not any(left), f"{left}")
