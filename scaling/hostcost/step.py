"""The collectives of one rank's step at any number of ranks, on one core, against stand-ins for all others.

It imports nothing of ``scaling``, so that it runs on the code of another checkout as well (``__main__`` starts it alone
in a process).

The transport is the real one, with the real plan, for memory of a device that MPI sees. Stand-ins are: communicators of
the given size, whose messages go to MPI_PROC_NULL, so that mpi4py and the entry of MPI cost what they cost; tensors on
torch's ``meta`` device; sums that only count what they would launch; and peers of the node that are always there. Left
out are: what the MPI library does for a message that really leaves, waits, copies inside a node, and the model itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import HostAccelerator
from hpczero.comm import Hierarchical, rails
from hpczero.comm.algorithms import Blocks
from hpczero.comm.devices import DirectReach
from hpczero.comm.inside import NodeLevel, Parts
from hpczero.comm.rails import Rails
from hpczero.job.group import Forwards, Group
from hpczero.job.watchdog import Watchdog
from hpczero.kernels import tree_sum as sums
from hpczero.kernels.source import MOST_BLOCKS_OF_ROWS
from hpczero.kernels.tree_sum import rows_of, sum_by_launches
from hpczero.memory.buffers import DTYPES, Use
from hpczero.models.config import PRESETS, parameter_shapes
from hpczero.plan.sizing import blockwise_plan

LEAST_S, MOST_RUNS = 0.2, 7  # of one call: it is repeated for so long, or so often
LEAST_RUNS = 4  # Python's collector of cycles makes some calls several times as long
ADDRESS = 2**40


class Nobody(MPI.Intracomm):
    """A communicator of any size; what this rank sends goes nowhere, and what it awaits is there."""

    _size: int
    _rank: int

    @property
    def size(self) -> int:  # type: ignore[override]  # MPI's is one to read too
        return self._size

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._rank

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        return super().Isend(buf, MPI.PROC_NULL, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Request:
        return super().Irecv(buf, MPI.PROC_NULL, tag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Prequest:
        return super().Send_init(buf, MPI.PROC_NULL, tag)

    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> MPI.Prequest:
        return super().Recv_init(buf, MPI.PROC_NULL, tag)

    def Sendrecv(self, *args: Any, **others: Any) -> None:
        """Of the comparison before a call that is new; the first run of each is not counted."""


class StandIn(Nobody):
    """A communicator whose small collectives are counted.

    Attributes:
        received: bytes that they have brought.
    """

    received: int

    def __new__(cls, size: int, rank: int) -> StandIn:
        self = super().__new__(cls, MPI.COMM_SELF)
        self._size, self._rank, self.received = size, rank, 0
        return self

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        self.received += recvbuf.nbytes
        recvbuf[:] = sendbuf

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self.received += recvbuf.nbytes
        recvbuf[:] = sendbuf


class Absent(HostAccelerator):
    """A device without memory, whose queue is always empty."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")

    def bring(self, tensor: Tensor) -> Tensor:
        """The form of it."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Elsewhere(Blocks):
    """Blocks of tensors without memory, whose address is 0; MPI wants another one, of which it reads nothing."""

    @override
    def block(self, index: int) -> MPI.buffer:
        return MPI.buffer.fromaddress(ADDRESS + self.start + index * self.stride, self.nbytes)

    @override
    def pieces(self, most_nbytes: int) -> Iterator[Blocks]:
        for piece in super().pieces(most_nbytes):
            yield Elsewhere(piece.tensor, piece.start, piece.nbytes, piece.stride, piece.count)


class Peers(NodeLevel):
    """Ranks of a node whose gradients are there at once."""

    most_nbytes = 2**62

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        return True

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        return None

    @override
    @contextmanager
    def reading(self, full: Tensor) -> Iterator[Parts]:
        yield lambda start, count: [full[start : start + count]] * self.comm.size

    @override
    def close(self) -> None:
        """Nothing to free."""


class OneOfMany(Hierarchical):
    """The transport of one rank whose peers are stand-ins."""

    _rails: Rails

    @override
    def _level(
        self, inside: str, group: Group, messages: NodeLevel, *, shares_wholes: bool
    ) -> NodeLevel:
        return Peers(group.node, self.memory, device=self.device)


class Sums:
    """In place of the transport's sums: counts what each would launch on a CUDA device, and does nothing.

    Torch has no device here whose launches cost what CUDA's do; the report charges them. What the transport does to
    cut a sum of many blocks into launches is real, and timed.

    Attributes:
        kernels: launches of the kernel of ``kernels.device_sum``.
        operations: launches of torch, where that kernel does not take the blocks.
    """

    def __init__(self) -> None:
        self.kernels = self.operations = 0
        # This process does nothing else.
        vars(sums).update(tree_sum=self)
        vars(rails).update(Blocks=Elsewhere)

    def __call__(
        self, blocks: Sequence[Tensor], out: Tensor, *, groups: Sequence[Any], **options: Any
    ) -> None:
        form = rows_of(blocks, out)
        if form is not None:
            several: dict[str, Any] = {"most": MOST_BLOCKS_OF_ROWS} if form[1].dim() == 2 else {}
            given: dict[str, Any] = {"groups": groups, "scale": 1.0, "accumulate": False, **several}
            if sum_by_launches(*form, launch=self._count, **given):
                return
        # Each block that is not fp32 is converted first (``kernels.tree_sum``).
        converted = len(blocks) if blocks[0].dtype is not torch.float32 else 0
        self.operations += len(blocks) - 1 + converted

    def _count(self, launch: object) -> bool:
        self.kernels += 1
        return True


def group_of(ranks: int, local: int, watchdog: Watchdog) -> Group:
    """The group of all ranks, seen by one in the middle of its node and of the job."""
    nodes = ranks // local
    node, mine = nodes // 2, local // 2
    comm = StandIn(ranks, node * local + mine)
    return Group(
        comm=comm,
        ordered=StandIn(ranks, mine * nodes + node),
        node=StandIn(local, mine),
        rail=StandIn(nodes, node),
        nodes=tuple(tuple(range(g * local, (g + 1) * local)) for g in range(nodes)),
        faked=True,
        watchdog=watchdog,
        forwards=Forwards(),
    )


def least(run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What the run with the least seconds in all has said; the first one is not counted."""
    run()
    found: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(found) < LEAST_RUNS or (
        len(found) < MOST_RUNS and time.perf_counter() - begin < LEAST_S
    ):
        found.append(run())
    return min(found, key=lambda said: said["seconds"])


def measure(model: str, precision: str, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Seconds of this thread in the collectives of one step at stage 3, by part, and counts.

    Units of equal shape are measured once, each call as often as ``least`` says. Gathers describe their messages to MPI
    anew in each call, which is the worst case: whole parameters need not come back to the same memory.
    """
    config = PRESETS[model]
    plan = blockwise_plan(parameter_shapes(config), num_shards=ranks, stage=3, precision=precision)
    dtype, node_dtype = DTYPES[plan.precision.param], DTYPES[plan.precision.reduce]
    watchdog = Watchdog(0, 0.0)
    group = group_of(ranks, ranks_per_node, watchdog)
    transport = OneOfMany(group, reach=DirectReach(Absent()), node_dtype=node_dtype)
    layouts = Counter((unit.layout.padded_numel, unit.layout.shard_numel) for unit in plan.units)
    sums, total, most = Sums(), defaultdict[str, float](float), layouts.most_common(1)[0][0]
    row: dict[str, Any] = {"ranks": ranks, "ranks_per_node": ranks_per_node}

    def timed(call: Callable[[], object]) -> dict[str, float]:
        sums.kernels = sums.operations = 0
        sent, begin = messages(transport), time.thread_time()
        call()
        return {
            "seconds": time.thread_time() - begin,
            "messages": messages(transport) - sent,
            "kernels": sums.kernels,
            "operations": sums.operations,
        }

    for (padded, shard), units in layouts.items():
        full = torch.empty(padded, dtype=dtype, device="meta")
        out = torch.empty(shard, dtype=torch.float32, device="meta")

        def gather(full: Tensor = full) -> dict[str, float]:
            for algorithm in transport._rails._gathers.values():
                algorithm.free()
            return timed(lambda: transport.all_gather(full, name="unit").wait())

        def reduce(full: Tensor = full, out: Tensor = out) -> dict[str, float]:
            call = transport.reduce_scatter
            return timed(lambda: call(full, out, scale=1.0, name="unit").wait())

        gathered, reduced = least(gather), least(reduce)
        total["gather_s"] += 2 * units * gathered["seconds"]
        total["exchange_s"] += units * reduced["seconds"]
        total["kernels"] += units * reduced["kernels"]
        total["operations"] += units * reduced["operations"]
        total["messages"] += units * (2 * gathered["messages"] + reduced["messages"])
        if (padded, shard) == most:
            row["gather_messages"] = int(gathered["messages"])
            row["reduce_messages"] = int(reduced["messages"])
    agreed = least(lambda: agree(transport, len(plan.units)))
    total["agreements_s"], total["agreements_nbytes"] = agreed["seconds"], agreed["nbytes"]
    row["exchange_nbytes"] = transport.exchange_nbytes
    counted = ("kernels", "operations", "messages", "agreements_nbytes")
    counts = {name: int(total.pop(name)) for name in counted}
    return {**row, **counts, **total, "units": len(plan.units)}


def messages(transport: Hierarchical) -> int:
    """Messages that were sent between nodes."""
    return int(sum(transport._rails.messages))


def agree(transport: Hierarchical, units: int) -> dict[str, float]:
    """The small collectives of a step."""
    group, comm = transport.group, transport.group.comm
    assert isinstance(comm, StandIn), "of this study"
    before, begin = comm.received, time.thread_time()
    transport.agree(np.zeros(64 + units, dtype=np.uint8), name="step")
    transport.total(0.1, name="grad_norm")
    group.total(0.1)  # loss
    group.largest(0)  # wishes to stop
    return {"seconds": time.thread_time() - begin, "nbytes": comm.received - before}


def main(words: Sequence[str]) -> int:
    """Print what ``measure`` finds for the case that ``words`` describe in JSON."""
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(measure(**json.loads(words[0]))))
    return 0
