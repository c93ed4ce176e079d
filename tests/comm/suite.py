"""What every transport must do. A new one adds a file beside ``test_flat.py`` with a subclass and its ``make``.

Sums are compared bit for bit with the order written out by hand (``tests/kernels``), on one node and on fake nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import hpczero
from hpczero.comm.codes import SentCodes
from hpczero.memory.buffers import Buffer, Use
from hpczero.plan.layout import Coding, ShardLayout
from tests.comm.conduct import DTYPES, ONE_NODE, ConductSuite
from tests.helpers.parallel import parallel_assert
from tests.kernels.reference import (
    IN_ORDER,
    Floats,
    drawn_and_decoded,
    exact,
    to_bf16_and_back,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Collectives, Topology

SHARD_SIZES = (0, 1, 7, 1000)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` brings to a sum: magnitudes that differ by rank, so that the order shows in the bits."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank - 2)).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def give(values: Tensor, into: Tensor) -> None:
    into.copy_(values)


def shard_owners(topology: Topology) -> list[int]:
    """World rank that owns each shard."""
    return [int(rank) for rank in topology.shard.ordered.allgather(topology.rank)]


def expected_sum(
    topology: Topology, numel: int, dtype: torch.dtype, node_dtype: torch.dtype
) -> Floats:
    """The whole reduced buffer in fp32: balanced tree in local order on each node, then over nodes."""
    nodes = []
    for ranks in topology.world.nodes:
        node = IN_ORDER[len(ranks)](*exact([contribution(r, numel, dtype) for r in ranks]))
        rounds = node_dtype is torch.bfloat16 and topology.num_nodes > 1
        nodes.append(to_bf16_and_back(node) if rounds else node)
    return IN_ORDER[len(nodes)](*nodes)


def own(topology: Topology, whole: Any) -> Any:
    """This rank's shard of a whole buffer."""
    size = len(whole) // topology.size
    return whole[topology.shard_index * size :][:size]


def by_flat(topology: Topology, full: Tensor) -> Tensor:
    """This rank's shard of the sum, by the transport that shares no memory."""
    out = torch.empty(full.numel() // topology.size)
    hpczero.Flat(topology).reduce_scatter(full, out, scale=1.0, name="alone").wait()
    return out


def allocated(
    transport: Collectives, numels: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[list[Buffer], list[Buffer]]:
    """Buffers of these sizes for parameters and for gradients, which nobody has taken yet."""
    wholes, gradients = [], []
    for numel in numels:
        wholes.append(transport.allocate(numel, dtype, category="test", use=Use.GATHER))
        gradients.append(transport.allocate(numel, dtype, category="test", use=Use.REDUCE))
        gradients[-1].release()
    transport.settle()
    return wholes, gradients


class CollectivesSuite(ConductSuite):
    """Subclass it as ``TestX`` and set ``make`` to what builds the transport; options are those of ``Collectives``."""

    large_numel = 2**20 + 3  # of a shard: more than a transport moves at once

    # --- all_gather

    def test_all_gather_fills_every_shard_with_its_owners_bits(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        owners = shard_owners(topology)
        for dtype, size in product(DTYPES, SHARD_SIZES):
            full = transport.allocate(size * comm.size, dtype, category="test").tensor
            full.fill_(torch.nan)
            own(topology, full)[:] = contribution(comm.rank, size, dtype)
            transport.all_gather(full, name="u").wait()
            expected = torch.cat([contribution(rank, size, dtype) for rank in owners])
            parallel_assert(comm, bits(full) == bits(expected), f"{size} x {dtype}")

    # --- reduce_scatter

    def test_reduce_scatter_is_the_tree_sum_bit_for_bit(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        for dtype, size in product(DTYPES, SHARD_SIZES):
            full = contribution(comm.rank, size * comm.size, dtype)
            out = torch.full((size,), torch.nan)
            transport.reduce_scatter(full, out, scale=0.5, name="u").wait()
            whole = expected_sum(topology, full.numel(), dtype, torch.float32) * np.float32(0.5)
            equal = out.numpy().tobytes() == own(topology, whole).tobytes()
            parallel_assert(comm, equal, f"{size} x {dtype}")
            unchanged = bits(full) == bits(contribution(comm.rank, full.numel(), dtype))
            parallel_assert(comm, unchanged, "the input was written")

    def test_accumulate_adds_to_what_is_there(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        full = contribution(comm.rank, 9 * comm.size, torch.float32)
        out = torch.arange(9.0)
        for _ in range(2):
            transport.reduce_scatter(full, out, scale=1.0 / 3.0, accumulate=True, name="u").wait()
        whole = expected_sum(topology, 9 * comm.size, torch.float32, torch.float32)
        scaled = own(topology, whole * np.float32(1.0 / 3.0))
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
        parallel_assert(comm, out.numpy().tobytes() == own(topology, whole).tobytes())

    @ONE_NODE
    def test_large_buffers(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        full = contribution(comm.rank, self.large_numel * comm.size, torch.bfloat16)
        out = torch.empty(self.large_numel)
        transport.reduce_scatter(full, out, scale=1.0, name="u").wait()
        whole = expected_sum(topology, full.numel(), torch.bfloat16, torch.float32)
        parallel_assert(comm, out.numpy().tobytes() == own(topology, whole).tobytes())
        gathered = torch.empty(full.numel())
        own(topology, gathered)[:] = out
        transport.all_gather(gathered, name="u").wait()
        parallel_assert(comm, gathered.numpy().tobytes() == whole.tobytes())

    # --- buffers that ranks may share

    def test_shared_buffers_carry_the_same_bits_whoever_is_late(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        """Rounds of gather, release and reduce in the transport's own buffers, with every rank late in its turn."""
        sizes, random, wrong = (40, 24, 33, 8), Random(comm.rank), []
        wholes, gradients = allocated(transport, [size * comm.size for size in sizes])
        owners = shard_owners(topology)
        for turn in range(12):
            order = range(len(sizes)) if turn % 2 else reversed(range(len(sizes)))
            for unit in order:
                size, whole, gradient = sizes[unit], wholes[unit], gradients[unit]
                time.sleep(random.choice((0.0, 0.0, 0.0, 0.003)))
                whole.take()
                own(topology, whole.tensor)[:] = contribution(comm.rank + turn, size, torch.float32)
                transport.all_gather(whole.tensor, name=f"{unit}").wait()
                expected = torch.cat([contribution(r + turn, size, torch.float32) for r in owners])
                if bits(whole.tensor) != bits(expected):
                    wrong.append(f"gather {unit} in turn {turn}")
                whole.release()
                gradient.take()
                gradient.tensor.copy_(contribution(comm.rank, size * comm.size, torch.float32))
                time.sleep(random.choice((0.0, 0.0, 0.0, 0.003)))
                out = torch.empty(size)
                transport.reduce_scatter(gradient.tensor, out, scale=1.0, name=f"{unit}").wait()
                gradient.release()
                total = expected_sum(topology, size * comm.size, torch.float32, torch.float32)
                if out.numpy().tobytes() != own(topology, total).tobytes():
                    wrong.append(f"reduce {unit} in turn {turn}")
        parallel_assert(comm, not wrong, ", ".join(wrong))

    def test_buffers_may_have_no_elements(
        self, comm: MPI.Intracomm, transport: Collectives
    ) -> None:
        """As those of a unit whose only parameter is ``torch.empty(0, 3)``."""
        (whole,), (gradient,) = allocated(transport, [0])
        for turn in range(2):
            whole.take()
            gradient.take()
            transport.all_gather(whole.tensor, name="none").wait()
            transport.reduce_scatter(
                gradient.tensor, torch.empty(0), scale=1.0, accumulate=turn > 0, name="none"
            ).wait()
            gradient.release()
            whole.release()
        parallel_assert(comm, not whole.tensor.numel() and not gradient.tensor.numel())

    def test_gradients_may_become_ready_in_any_order(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        size = 16
        _, gradients = allocated(transport, [size * comm.size] * 6)
        for unit, gradient in enumerate(gradients):  # all at once: more than there are places
            gradient.take()
            gradient.tensor.copy_(contribution(comm.rank + unit, size * comm.size, torch.float32))
        for unit, gradient in reversed(list(enumerate(gradients))):
            out = torch.empty(size)
            transport.reduce_scatter(gradient.tensor, out, scale=1.0, name=f"{unit}").wait()
            gradient.release()
            plain = contribution(comm.rank + unit, size * comm.size, torch.float32)
            parallel_assert(comm, bits(out) == bits(by_flat(topology, plain)), f"unit {unit}")

    def test_calls_may_be_waited_for_long_after_the_next_ones(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        """A dozen gathers and reductions under way; gradients are released at once and their memory filled anew."""
        size, random, units = 24, Random(comm.rank), range(12)
        wholes, gradients = allocated(transport, [size * comm.size for _ in units])
        outs, works = [torch.empty(size) for _ in units], []
        for unit in units:
            time.sleep(random.choice((0.0, 0.0, 0.0, 0.003)))
            mine = contribution(comm.rank + unit, size, torch.float32)
            wholes[unit].take()
            own(topology, wholes[unit].tensor)[:] = mine
            works.append(transport.all_gather(wholes[unit].tensor, name=f"{unit}"))
            gradient = gradients[unit]
            gradient.take()
            gradient.tensor.copy_(contribution(comm.rank, size * comm.size, torch.float32) + unit)
            works.append(
                transport.reduce_scatter(gradient.tensor, outs[unit], scale=1.0, name=f"{unit}")
            )
            gradient.release()
        for work in reversed(works):
            work.wait()
        owners, wrong = shard_owners(topology), []
        for unit in units:
            expected = torch.cat([contribution(r + unit, size, torch.float32) for r in owners])
            if bits(wholes[unit].tensor) != bits(expected):
                wrong.append(f"gather {unit}")
            plain = contribution(comm.rank, size * comm.size, torch.float32) + unit
            if bits(outs[unit]) != bits(by_flat(topology, plain)):
                wrong.append(f"reduce {unit}")
        parallel_assert(comm, not wrong, ", ".join(wrong))


# Two matrices, a vector between them and a number; the vector's blocks and the number's are exact.
SHAPES = (("m", (30, 31)), ("v", (70,)), ("n", (9, 100)), ("x", ()), ("o", (800, 2)))


class CodesSuite(CollectivesSuite):
    """For transports that send gradients between nodes in codes."""

    def test_codes_between_nodes_have_the_bits_that_are_written_out(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        layout = ShardLayout.pack(SHAPES, comm.size)
        for name, dtype in (("int8", torch.float32), ("int4", torch.float32), ("int8", DTYPES[1])):
            coding = Coding.of(layout, name)
            assert coding is not None
            codes = SentCodes(coding, f"step 3, 0, {name}")
            full = contribution(comm.rank, layout.padded_numel, dtype)
            out = torch.ones(layout.shard_numel)
            work = transport.reduce_scatter(
                full, out, scale=0.5, accumulate=True, name="u", codes=codes
            )
            work.wait()
            whole = self._expected(topology, coding, codes.which, dtype)
            expected = np.float32(1) + own(topology, whole * np.float32(0.5))
            parallel_assert(comm, out.numpy().tobytes() == expected.tobytes(), f"{name} x {dtype}")

    def test_parameters_in_codes_are_on_every_rank_what_is_written_out(
        self, comm: MPI.Intracomm, topology: Topology, transport: Collectives
    ) -> None:
        layout = ShardLayout.pack(SHAPES, comm.size)
        coding = Coding.of(layout, "int8")
        assert coding is not None
        for dtype in DTYPES[:2]:
            whole = contribution(7, layout.padded_numel, dtype)
            full = transport.allocate(layout.padded_numel, dtype, category="test").tensor
            full.fill_(torch.nan)
            mine, codes = own(topology, whole), SentCodes(coding, "step 4")
            transport.all_gather(full, name="u", read=partial(give, mine), codes=codes).wait()
            expected = self._said(coding, "step 4, node 0", whole.float().numpy())
            if topology.num_nodes == 1:
                expected = whole.float().numpy()
            parallel_assert(
                comm, bits(full) == bits(torch.from_numpy(expected).to(dtype)), str(dtype)
            )

    def _said(self, coding: Coding, text: str, values: Floats) -> Floats:
        layout, most = coding.layout, {"sent8": 127, "sent4": 7}[coding.codec.name]
        small = np.zeros(layout.padded_numel, dtype=bool)
        for slot in layout.slots:
            if len(slot.shape) < 2:
                small[slot.offset // 64 * 64 : -(-slot.stop // 64) * 64] = True
        return np.where(small, values, drawn_and_decoded(values, most, text, 0))

    def _expected(
        self, topology: Topology, coding: Coding, which: str, dtype: torch.dtype
    ) -> Floats:
        numel, nodes = coding.layout.padded_numel, []
        for number, ranks in enumerate(topology.world.nodes):
            node = IN_ORDER[len(ranks)](*exact([contribution(r, numel, dtype) for r in ranks]))
            said = self._said(coding, f"{which}, node {number}", node)
            nodes.append(node if topology.num_nodes == 1 else said)
        return IN_ORDER[len(nodes)](*nodes)
