"""What every transport must do. A new one adds a file beside ``test_flat.py`` with a subclass and its ``make``.

Sums are compared bit for bit with the order written out by hand (``tests/kernels``), on one node and on fake nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.errors import CommError
from tests.helpers.parallel import parallel_assert
from tests.kernels.test_tree_sum import IN_ORDER, Floats, exact, to_bf16_and_back
from tests.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Collectives, Topology

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
SHARD_SIZES = pytest.mark.parametrize("shard_numel", [0, 1, 7, 1000])


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` brings to a sum: magnitudes that differ by rank, so that the order shows in the bits."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank - 2)).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def shard_owners(topology: Topology) -> list[int]:
    """World rank that owns each shard."""
    return [int(rank) for rank in topology.shard.allgather(topology.rank)]


def expected_sum(
    topology: Topology, numel: int, dtype: torch.dtype, node_dtype: torch.dtype
) -> Floats:
    """The whole reduced buffer in fp32: balanced tree in local order on each node, then over nodes."""
    nodes = []
    for ranks in topology.nodes:
        node = IN_ORDER[len(ranks)](*exact([contribution(r, numel, dtype) for r in ranks]))
        rounds = node_dtype is torch.bfloat16 and topology.num_nodes > 1
        nodes.append(to_bf16_and_back(node) if rounds else node)
    return IN_ORDER[len(nodes)](*nodes)


@pytest.mark.mpi
class CollectivesSuite:
    """Subclass it as ``TestX`` and set ``make`` to what builds the transport; options are those of ``Collectives``."""

    make: Any

    @pytest.fixture(params=["one node", "cyclic", "uneven"])
    def topology(
        self, comm: MPI.Intracomm, request: pytest.FixtureRequest
    ) -> Iterator[hpczero.Topology]:
        """All ranks as one node, as nodes of every other rank, and as a small and a large node."""
        size, last = comm.size, comm.size - 1
        nodes = {
            "one node": [0] * size,
            "cyclic": [rank % 2 for rank in range(size)],
            "uneven": [int(rank == last) for rank in range(size)],
        }
        topology = hpczero.Topology.create(comm, nodes[request.param])
        yield topology
        topology.free()

    @pytest.fixture
    def transport(self, topology: Topology) -> Iterator[Collectives]:
        transport = type(self).make(topology)
        yield transport
        transport.close()

    # --- all_gather

    @DTYPES
    @SHARD_SIZES
    def test_all_gather_fills_every_shard_with_its_owners_bits(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        transport: Collectives,
        dtype: torch.dtype,
        shard_numel: int,
    ) -> None:
        owners = shard_owners(topology)
        buffer = transport.allocate(shard_numel * comm.size, dtype, category="test")
        buffer.tensor.fill_(float("nan"))
        mine = slice(topology.shard_index * shard_numel, (topology.shard_index + 1) * shard_numel)
        buffer.tensor[mine] = contribution(comm.rank, shard_numel, dtype)
        transport.all_gather(buffer.tensor, name="u").wait()
        expected = torch.cat([contribution(rank, shard_numel, dtype) for rank in owners])
        parallel_assert(comm, bits(buffer.tensor) == bits(expected))

    # --- reduce_scatter

    @DTYPES
    @SHARD_SIZES
    def test_reduce_scatter_is_the_tree_sum_bit_for_bit(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        transport: Collectives,
        dtype: torch.dtype,
        shard_numel: int,
    ) -> None:
        numel, index = shard_numel * comm.size, topology.shard_index
        full = contribution(comm.rank, numel, dtype)
        out = torch.full((shard_numel,), torch.nan)
        transport.reduce_scatter(full, out, scale=0.5, name="u").wait()
        whole = expected_sum(topology, numel, dtype, torch.float32) * np.float32(0.5)
        expected = whole[index * shard_numel : (index + 1) * shard_numel]
        parallel_assert(comm, out.numpy().tobytes() == expected.tobytes())
        unchanged = bits(full) == bits(contribution(comm.rank, numel, dtype))
        parallel_assert(comm, unchanged, "the input was written")

    def test_accumulate_adds_to_what_is_there(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        full = contribution(comm.rank, 9 * comm.size, torch.float32)
        out = torch.arange(9.0)
        for _ in range(2):
            transport.reduce_scatter(full, out, scale=1.0 / 3.0, accumulate=True, name="u").wait()
        whole = expected_sum(topology, 9 * comm.size, torch.float32, torch.float32)
        scaled = (whole * np.float32(1.0 / 3.0))[topology.shard_index * 9 :][:9]
        expected = (np.arange(9, dtype=np.float32) + scaled) + scaled
        parallel_assert(comm, out.numpy().tobytes() == expected.tobytes())

    def test_partial_sums_of_nodes_travel_in_node_dtype(
        self, comm: MPI.Intracomm, topology: Topology
    ) -> None:
        transport = type(self).make(topology, node_dtype=torch.bfloat16)
        full = contribution(comm.rank, 33 * comm.size, torch.bfloat16)
        out = torch.empty(33)
        transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
        transport.close()
        whole = expected_sum(topology, 33 * comm.size, torch.bfloat16, torch.bfloat16)
        expected = whole[topology.shard_index * 33 :][:33]
        parallel_assert(comm, out.numpy().tobytes() == expected.tobytes())

    def test_large_buffers(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        if topology.num_nodes > 1:
            return  # size is what is tested here, once is enough
        shard_numel, index = 2**20 + 3, topology.shard_index
        full = contribution(comm.rank, shard_numel * comm.size, torch.bfloat16)
        out = torch.empty(shard_numel)
        transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
        whole = expected_sum(topology, full.numel(), torch.bfloat16, torch.float32)
        parallel_assert(
            comm, out.numpy().tobytes() == whole[index * shard_numel :][:shard_numel].tobytes()
        )
        gathered = torch.empty(full.numel())
        gathered[index * shard_numel : (index + 1) * shard_numel] = out
        transport.all_gather(gathered, name="u").wait()
        parallel_assert(comm, gathered.numpy().tobytes() == whole.tobytes())

    # --- refusals: before anything is sent, on the rank that calls

    @pytest.mark.parametrize(
        ("make_full", "message"),
        [
            (lambda n: torch.zeros(2, n * 2)[:, :n].reshape(2, n).t()[0:1], "expected flat"),
            (lambda n: torch.zeros(4 * n)[::2], "contiguous: False"),
            (lambda n: torch.zeros(2 * n, dtype=torch.float64), "torch.float64"),
            (lambda n: torch.zeros(2 * n, dtype=torch.int32), "torch.int32"),
        ],
        ids=["two dimensions", "strided", "fp64", "int32"],
    )
    def test_buffer_that_cannot_be_sent_is_refused(
        self, comm: MPI.Intracomm, transport: Collectives, make_full: Any, message: str
    ) -> None:
        full = make_full(comm.size)
        calls = (
            lambda: transport.all_gather(full, name="unit 7"),
            lambda: transport.reduce_scatter(full, torch.zeros(2), scale=1.0, name="unit 7"),
        )
        for call in calls:
            with pytest.raises(CommError, match=message) as raised:
                call()
            assert "'unit 7'" in str(raised.value)
            assert f"rank {comm.rank}" in str(raised.value)
        assert not transport.stats.calls, "a refused call is not counted"

    @pytest.mark.parametrize(
        "out",
        [torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros(4)[::2]],
        ids=["fp64", "too long", "strided"],
    )
    def test_output_that_does_not_fit_is_refused(
        self, comm: MPI.Intracomm, transport: Collectives, out: Tensor
    ) -> None:
        with pytest.raises(CommError, match="expected 2 contiguous float32"):
            transport.reduce_scatter(torch.zeros(2 * comm.size), out, scale=1.0, name="u")

    def test_buffer_that_does_not_cut_into_shards_is_refused(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        if comm.size == 1:
            return  # every size cuts into one shard
        with pytest.raises(CommError, match=f"a multiple of {comm.size} shards"):
            transport.all_gather(torch.zeros(2 * comm.size + 1), name="u")

    # --- broadcast, agree, share

    @pytest.mark.parametrize("numel", [0, 5])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    def test_broadcast_gives_the_roots_bytes_to_all(
        self, comm: MPI.Intracomm, transport: Collectives, dtype: torch.dtype, numel: int
    ) -> None:
        root = comm.size - 1
        full = torch.arange(numel).to(dtype) + comm.rank
        transport.broadcast(full, root=root, name="u").wait()
        parallel_assert(comm, torch.equal(full, torch.arange(numel).to(dtype) + root))

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

    def test_accounts_are_exact(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        others = comm.size - 1
        transport.all_gather(torch.zeros(7 * comm.size, dtype=torch.bfloat16), name="u").wait()
        transport.all_gather(torch.zeros(3 * comm.size), name="v").wait()
        transport.reduce_scatter(
            torch.zeros(5 * comm.size), torch.zeros(5), scale=1.0, name="u"
        ).wait()
        transport.broadcast(torch.zeros(11), root=0, name="u").wait()
        stats = transport.stats
        calls = {"all_gather": 2, "reduce_scatter": 1, "broadcast": 1}
        parallel_assert(comm, stats.calls == calls, str(stats.calls))
        sent = 11 if comm.rank == 0 else 0
        numel = {"all_gather": 10 * others, "reduce_scatter": 5 * others, "broadcast": sent}
        parallel_assert(comm, stats.sent_numel == numel, str(stats.sent_numel))
        nbytes = {
            "all_gather": (7 * 2 + 3 * 4) * others,
            "reduce_scatter": 5 * 4 * others,
            "broadcast": 4 * sent,
        }
        parallel_assert(comm, stats.sent_nbytes == nbytes, str(stats.sent_nbytes))
        parallel_assert(comm, stats.seconds > 0)
        stats.reset()
        parallel_assert(comm, not stats.calls and not stats.sent_nbytes and stats.seconds == 0)

    def test_fingerprint_is_equal_on_all_ranks_and_tells_sequences_apart(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        seen = [transport.fingerprint]
        for name in ("u", "v", "u"):
            transport.all_gather(torch.zeros(comm.size), name=name).wait()
            seen.append(transport.fingerprint)
        parallel_assert(comm, comm.allgather(seen) == [seen] * comm.size)
        parallel_assert(comm, len(set(seen)) == 4, str(seen))

    def test_allocated_memory_is_in_the_ledger_until_it_is_released(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        buffer = transport.allocate(10, torch.bfloat16, category="test")
        parallel_assert(comm, transport.memory.current["test"] == 20)
        buffer.release()
        parallel_assert(comm, transport.memory.current["test"] == 0)
        parallel_assert(comm, transport.memory.peak["test"] == 20)

    # --- order

    def test_strict_lets_equal_sequences_pass(
        self, comm: MPI.Intracomm, topology: Topology
    ) -> None:
        transport = type(self).make(topology, strict=True)
        for name in ("u", "v"):
            full = torch.full((comm.size,), float(comm.rank))
            transport.all_gather(full, name=name).wait()
            parallel_assert(comm, sorted(full.tolist()) == [float(r) for r in range(comm.size)])
        transport.broadcast(torch.zeros(3), root=0, name="u").wait()
        transport.close()

    @pytest.mark.parametrize("difference", ["unit", "operation", "size"])
    def test_strict_names_the_rank_that_makes_another_call(
        self, comm: MPI.Intracomm, topology: Topology, difference: str
    ) -> None:
        if comm.size < 2:
            return  # one rank agrees with itself
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
