"""How every transport conducts itself: what it refuses, what it counts, that it notices another order.

``CollectivesSuite`` adds to these tests those of the values that it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import hpczero
from hpczero.errors import CommError
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Collectives, Topology
    from hpczero.comm.devices import Reach

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE_NODE = pytest.mark.parametrize("topology", ["one node"], indirect=True)


def on_nodes(place: Callable[[str, int], list[int]], ranks: Mapping[str, Sequence[int]]) -> Any:
    """A fixture of topologies by name, on any or on these numbers of ranks; ``place`` has the node of each rank."""
    names = [
        pytest.param(name, marks=pytest.mark.ranks(*sizes) if sizes else ())
        for name, sizes in ranks.items()
    ]

    @pytest.fixture(params=names)
    def topology(
        self: Any, comm: MPI.Intracomm, request: pytest.FixtureRequest
    ) -> Iterator[Topology]:
        topology = hpczero.Topology.create(comm, place(request.param, comm.size))
        yield topology
        topology.free()

    return topology


def in_turn(name: str, size: int) -> list[int]:
    """All ranks as one node, as nodes of every other rank, and as a small and a large node."""
    return {
        "one node": [0] * size,
        "cyclic": [rank % 2 for rank in range(size)],
        "uneven": [int(rank == size - 1) for rank in range(size)],
    }[name]


def makes(
    kind: Callable[..., Collectives], reach: Callable[[Any], Reach] | None = None, **options: Any
) -> Any:
    """For ``make``: builds ``kind`` with these options; with ``reach`` over a device whose lanes are late."""

    def make(topology: Topology, **more: Any) -> Collectives:
        if reach is not None:
            more["reach"] = reach(LateAccelerator())
        return kind(topology, **options, **more)

    return staticmethod(make)


@pytest.mark.mpi
class ConductSuite:
    """Needs ``make``: what builds the transport; options are those of ``Collectives``."""

    make: Any

    topology = on_nodes(in_turn, {"one node": (), "cyclic": (2, 4, 5), "uneven": (3, 5)})

    @pytest.fixture
    def transport(self, topology: Topology) -> Iterator[Collectives]:
        transport = type(self).make(topology)
        yield transport
        transport.close()

    # --- refusals: before anything is sent, on the rank that calls

    @ONE_NODE
    def test_buffers_that_do_not_fit_are_refused(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        unfit = {
            "expected flat contiguous": torch.zeros(comm.size, 2),
            "contiguous: False": torch.zeros(4 * comm.size)[::2],
            "torch.float64": torch.zeros(2 * comm.size, dtype=torch.float64),
            "torch.int32": torch.zeros(2 * comm.size, dtype=torch.int32),
        }
        out = torch.zeros(2)
        for message, full in unfit.items():
            said = f"rank {comm.rank}: .*'unit 7'.*{message}"
            with pytest.raises(CommError, match=said):
                transport.all_gather(full, name="unit 7")
            with pytest.raises(CommError, match=said):
                transport.reduce_scatter(full, out, scale=1.0, name="unit 7")
        full = torch.zeros(2 * comm.size)
        for out in (torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros(4)[::2]):
            with pytest.raises(CommError, match="expected 2 contiguous float32"):
                transport.reduce_scatter(full, out, scale=1.0, name="u")
        assert not transport.stats.calls, "a refused call is not counted"

    @ONE_NODE
    @pytest.mark.mpi(min_size=2)
    def test_buffer_that_does_not_cut_into_shards_is_refused(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        with pytest.raises(CommError, match=f"a multiple of {comm.size} shards"):
            transport.all_gather(torch.zeros(2 * comm.size + 1), name="u")

    # --- broadcast, agree, share

    def test_broadcast_gives_the_roots_bytes_to_all(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        root = comm.size - 1
        for dtype, numel in product((*DTYPES, torch.int64, torch.uint8), (0, 5)):
            full = torch.arange(numel).to(dtype) + comm.rank
            transport.broadcast(full, root=root, name="u").wait()
            equal = torch.equal(full, torch.arange(numel).to(dtype) + root)
            parallel_assert(comm, equal, f"{numel} x {dtype}")

    @ONE_NODE
    def test_agree_is_the_bitwise_or_of_all_ranks(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        mine = np.array([1 << comm.rank, 128, 0], dtype=np.uint8)
        found = transport.agree(mine, name="flags")
        parallel_assert(comm, found.tolist() == [2**comm.size - 1, 128, 0], str(found))
        parallel_assert(comm, mine.tolist() == [1 << comm.rank, 128, 0], "the input was written")

    def test_share_has_the_numbers_of_all_ranks_in_rank_order(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        found = transport.share(np.array([comm.rank + 1 / 3, np.nan]), name="norms")
        expected = [[rank + 1 / 3, np.nan] for rank in range(comm.size)]
        parallel_assert(comm, np.array_equal(found, np.array(expected), equal_nan=True))

    # --- accounts

    @ONE_NODE
    def test_accounts_are_exact(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        others = comm.size - 1
        transport.all_gather(torch.zeros(7 * comm.size, dtype=torch.bfloat16), name="u").wait()
        transport.all_gather(torch.zeros(3 * comm.size), name="v").wait()
        full, out = torch.zeros(5 * comm.size), torch.zeros(5)
        transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
        transport.broadcast(torch.zeros(11), root=0, name="u").wait()
        stats = transport.stats
        calls = {"all_gather": 2, "reduce_scatter": 1, "broadcast": 1}
        parallel_assert(comm, stats.calls == calls, str(stats.calls))
        sent = 11 if comm.rank == 0 else 0
        nbytes = {"all_gather": (7 * 2 + 3 * 4) * others, "reduce_scatter": 5 * 4 * others}
        nbytes["broadcast"] = 4 * sent
        parallel_assert(comm, stats.sent_nbytes == nbytes, str(stats.sent_nbytes))
        parallel_assert(comm, stats.seconds > 0)
        stats.reset()
        parallel_assert(comm, not stats.calls and not stats.sent_nbytes and stats.seconds == 0)

    @ONE_NODE
    def test_fingerprint_is_equal_on_all_ranks_and_tells_sequences_apart(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        seen = [transport.calls.fingerprint]
        for name in ("u", "v", "u"):
            transport.all_gather(torch.zeros(comm.size), name=name).wait()
            seen.append(transport.calls.fingerprint)
        parallel_assert(comm, comm.allgather(seen) == [seen] * comm.size)
        parallel_assert(comm, len(set(seen)) == 4, str(seen))

    @ONE_NODE
    def test_allocated_memory_is_in_the_ledger_until_it_is_released(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        buffer = transport.allocate(10, torch.bfloat16, category="test")
        parallel_assert(comm, transport.memory.current["test"] == 20)
        buffer.release()
        parallel_assert(comm, transport.memory.current["test"] == 0)
        parallel_assert(comm, transport.memory.peak["test"] == 20)

    # --- order

    @ONE_NODE
    @pytest.mark.mpi(min_size=2)
    @pytest.mark.parametrize("difference", ["unit", "operation", "size"])
    def test_strict_names_the_rank_that_makes_another_call(
        self, comm: MPI.Intracomm, topology: Topology, difference: str
    ) -> None:
        transport = type(self).make(topology, strict=True)
        odd = comm.rank == comm.size - 1

        def call() -> None:
            numel = comm.size * (2 if odd and difference == "size" else 1)
            name = "v" if odd and difference == "unit" else "u"
            if odd and difference == "operation":
                transport.reduce_scatter(torch.zeros(numel), torch.zeros(1), scale=1.0, name=name)
            else:
                transport.all_gather(torch.zeros(numel), name=name)

        said = raises_on_all(comm, CommError, f"rank {comm.size - 1}: ", call)
        parallel_assert(comm, said.count("rank 0") == 0, said)
        transport.close()
