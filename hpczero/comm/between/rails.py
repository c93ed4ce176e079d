"""The level between nodes: ranks with the same local rank, each over its own connection.

Owns: the algorithm for each size, the pieces in which sums and messages overlap, and the dtype of partial sums on the
network. Must not know: how the ranks of a node share, units, stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import EXCHANGES, GATHERS, Exchange, Gather, Prepare
from hpczero.comm.algorithms.base import CHUNK_BYTES, Blocks
from hpczero.comm.between.selection import DEFAULT, Selection
from hpczero.comm.devices.access import HostReach, Reach
from hpczero.comm.inside.level import Parts
from hpczero.errors import ConfigError
from hpczero.kernels.tree_sum import piece_numel, pieces, tree_sum
from hpczero.memory.buffers import Memory, Scratch
from hpczero.plan.rounds import gather_round, rail_chunk, rail_turns


class BetweenLevel(ABC):
    """This rank's part in what goes between nodes. The other ranks of its node do theirs at the same time.

    Attributes:
        comm: ranks that it exchanges with; borrowed. It carries nothing else while bytes move.
        selection: which algorithm serves which size.
    """

    comm: MPI.Intracomm
    selection: Selection

    @abstractmethod
    def select(self, selection: Selection) -> None:
        """Use other algorithms from now on. Equal on all ranks; not collective.

        Raises:
            ConfigError: an algorithm does not work between these nodes.
        """

    @abstractmethod
    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of partial sums of ``dtype`` on the network."""

    @abstractmethod
    def describe(self) -> str:
        """Part of a line for a run header."""

    @property
    @abstractmethod
    def messages(self) -> tuple[int, int]:
        """Messages that this rank has sent for gathers and for reductions; the library's own do not count."""

    @abstractmethod
    def gather(self, full: Tensor, shard_numel: int) -> None:
        """Bring the shards of other nodes to this node, in place. Collective over all ranks of the group.

        Args:
            full: (num_shards * shard_numel,), this rank's shard in its slice. Afterwards each element of it is on a
                rank of this node.
            shard_numel: elements of one rank's shard.
        """

    @abstractmethod
    def reduce(
        self,
        parts: Parts,
        out: Tensor,
        dtype: torch.dtype,
        scale: float,
        accumulate: bool,
        *,
        spans: bool = True,
    ) -> None:
        """Sum over the ranks of each node and then over nodes. Collective over all ranks of the group.

        Args:
            parts: every local rank's elements. All ranks of a node make as many calls.
            out: (shard_numel,) fp32, this rank's shard.
            dtype: dtype of the parts.
            scale: multiplies the sum.
            accumulate: whether to add to ``out`` instead of replacing it.
            spans: whether ``parts`` are views, so that what lies between the elements in question costs nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Free datatypes and scratch. Not collective."""


# Elements of fp32 sums that are rounded at a time, where a device sums everything else at once.
NARROWED_NUMEL = 4 * 2**20


class Rails(BetweenLevel):
    """This rank's rail. The other rails of its node do the same at the same time.

    Attributes:
        comm: one rank of every node, in the order of the nodes; borrowed.
        selection: which algorithm serves which size.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: Memory,
        *,
        local_size: int,
        local_rank: int,
        node_dtype: torch.dtype,
        selection: Selection = DEFAULT,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Not collective.

        Args:
            comm: must outlive the rails. It carries nothing else while they move bytes.
            memory: ledger of buffers.
            local_size: ranks of each node.
            local_rank: place of the rail's ranks on their nodes.
            node_dtype: each node's partial sum is rounded to it.
            selection: equal on all ranks.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.
            reach: as in Collectives.

        Raises:
            ConfigError: an algorithm that does not work on this number of nodes.
        """
        self.comm = comm
        self._local_size, self._local_rank = local_size, local_rank
        self._node_dtype = node_dtype
        self._chunk_nbytes = chunk_nbytes
        self._reach = reach or HostReach()
        self._device = self._reach.accelerator.device
        self._scratch = Scratch(memory, category="exchange", device=self._device)
        self._gathers: dict[str, Gather] = {}
        self._exchanges: dict[str, Exchange] = {}
        self.select(selection)

    @override
    def select(self, selection: Selection) -> None:
        names = {choice.algorithm for choice in (*selection.gathers, *selection.exchanges)}
        for kind in (*GATHERS, *EXCHANGES):
            if kind.name in names and not kind.fits(self.comm.size):
                error = ConfigError(
                    f"algorithms: {kind.name} does not work between {self.comm.size} nodes, expected one that does; "
                    "leave it to auto"
                )
                error.agreed = True
                raise error
        self.selection = selection

    @override
    def wire(self, dtype: torch.dtype) -> torch.dtype:
        # One rank per node has nothing to add up: its gradient travels as it is, if that is not wider.
        alone = self._local_size == 1 and dtype.itemsize <= self._node_dtype.itemsize
        return dtype if alone else self._node_dtype

    @override
    def gather(self, full: Tensor, shard_numel: int) -> None:
        nodes = self.comm.size
        first = self._local_rank * nodes * shard_numel
        blocks = Blocks.of(full, first, shard_numel, shard_numel, nodes)
        choice = self.selection.gather_for(blocks.nbytes)
        gather, most = self._gather_called(choice.algorithm), CHUNK_BYTES
        if gather.in_rounds:
            most = gather_round(blocks.nbytes, nodes, choice.chunk_nbytes)
        gather(blocks, round_nbytes=most)

    @override
    def reduce(
        self,
        parts: Parts,
        out: Tensor,
        dtype: torch.dtype,
        scale: float,
        accumulate: bool,
        *,
        spans: bool = True,
    ) -> None:
        # Of what this rail owns slice g is for node g.
        nodes, me, wire, shard_numel = self.comm.size, self.comm.rank, self.wire(dtype), out.numel()
        is_host = self._reach.accelerator.is_host
        choice = self.selection.exchange_for(shard_numel * wire.itemsize)
        exchange = self._exchange_called(choice.algorithm)
        chunk = rail_chunk(shard_numel, nodes, wire.itemsize, choice.chunk_nbytes)
        chunk = max(min(chunk, self._chunk_nbytes // wire.itemsize), 1)
        turns, first = rail_turns(shard_numel, chunk), self._local_rank * nodes * shard_numel
        # What a rank alone on its node sends is its gradient: no sum, no copy.
        alone = self._local_size == 1 and dtype is wire and exchange.takes_gaps and is_host
        sides = 1 if alone else 2
        buffers = self._scratch.get(turns * sides * nodes * chunk, wire)
        buffers = buffers.view(turns, sides, nodes * chunk)
        left: Callable[[], None] = lambda: None  # noqa: E731  (what the chunk before still needs)

        for turn, start in enumerate(range(0, shard_numel, chunk)):
            count = min(chunk, shard_numel - start)
            *sums, receive = buffers[turn % turns, :, : nodes * count]
            if alone:
                (gradient,) = parts(start, (nodes - 1) * shard_numel + count)
                send = Blocks.of(gradient, 0, count, shard_numel, nodes)
                prepare: Prepare = lambda first, many: None  # noqa: E731
                own = gradient[me * shard_numel :][:count]
            else:
                (summed,) = sums
                send = Blocks.of(summed, 0, count, count, nodes)
                rows = summed.view(nodes, count)
                prepare = partial(
                    self._sum_node, parts, rows, first + start, shard_numel, spans=spans
                )
                own = rows[me]
            came = Blocks.of(receive, 0, count, count, nodes)
            exchange(send, came, prepare=prepare, meanwhile=left)
            left = partial(
                self._sum_nodes, own, receive, out[start : start + count], scale, accumulate
            )
        exchange.finish()
        left()

    def _sum_node(
        self,
        parts: Parts,
        send: Tensor,
        start: int,
        shard_numel: int,
        first: int,
        many: int,
        *,
        spans: bool,
    ) -> None:
        """Sum over the ranks of this node what neighbouring nodes will get, into rows of ``send``."""
        count = send.shape[1]
        if not spans and many > 1:
            for node in range(first, first + many):
                self._sum_node(parts, send, start, shard_numel, node, 1, spans=True)
            return
        blocks = parts(first * shard_numel + start, (many - 1) * shard_numel + count)
        if count == shard_numel or many == 1:  # no gaps: one row
            into = send[first] if many == 1 else send[first : first + many].view(-1)
        else:
            into = send[first : first + many]
            blocks = [block.as_strided((many, count), (shard_numel, 1)) for block in blocks]
        sum_of_node(blocks, into, self.comm)

    def _sum_nodes(
        self, own: Tensor, received: Tensor, out: Tensor, scale: float, accumulate: bool
    ) -> None:
        """Sum one chunk of all nodes' partial sums. This node's own is read from where it was made."""
        rows = list(received.view(self.comm.size, -1).unbind())
        rows[self.comm.rank] = own
        sum_of_nodes(rows, out, scale=scale, accumulate=accumulate, node_dtype=self._node_dtype)

    @override
    def describe(self) -> str:
        return f"between nodes {self.selection.describe()}"

    @property
    @override
    def messages(self) -> tuple[int, int]:
        algorithms = (self._gathers.values(), self._exchanges.values())
        gathered, reduced = (sum(each.messages for each in kind) for kind in algorithms)
        return gathered, reduced

    def _gather_called(self, name: str) -> Gather:
        if name not in self._gathers:
            kind = next(kind for kind in GATHERS if kind.name == name)
            self._gathers[name] = self._reach.gather(
                kind, self.comm, chunk_nbytes=self._chunk_nbytes
            )
        return self._gathers[name]

    def _exchange_called(self, name: str) -> Exchange:
        if name not in self._exchanges:
            kind = next(kind for kind in EXCHANGES if kind.name == name)
            self._exchanges[name] = self._reach.exchange(
                kind, self.comm, chunk_nbytes=self._chunk_nbytes
            )
        return self._exchanges[name]

    @override
    def close(self) -> None:
        for algorithm in (*self._gathers.values(), *self._exchanges.values()):
            algorithm.free()
        self._scratch.release()


def sum_of_node(blocks: Sequence[Tensor], into: Tensor, comm: MPI.Intracomm) -> None:
    """Set ``into`` to the partial sum of one node, rounded once to its dtype. Not collective.

    Args:
        blocks: what each local rank has, in local order.
        into: of the same shape, in the dtype of the network.
        comm: whose messages go on meanwhile.
    """
    narrow = into.dtype is not torch.float32
    most = min(piece_numel(into.device), NARROWED_NUMEL if narrow else 2**62)
    for piece in pieces(into.shape, most) if into.numel() > most else (...,):
        target, rows = into, blocks
        if piece is not ...:
            target, rows = into[piece], [block[piece] for block in blocks]
        total = torch.empty_like(target, dtype=torch.float32) if narrow else target
        tree_sum(rows, total, groups=[range(len(rows))], scale=1.0)
        if narrow:
            target.copy_(total)
        comm.Iprobe()  # messages of earlier steps go on only inside MPI


def sum_of_nodes(
    rows: Sequence[Tensor],
    out: Tensor,
    *,
    scale: float,
    accumulate: bool,
    node_dtype: torch.dtype,
) -> None:
    """Set ``out (+)= scale *`` the sum of all nodes' partial sums, in the order of the nodes. Not collective."""
    tree_sum(
        rows,
        out,
        groups=[[node] for node in range(len(rows))],
        scale=scale,
        accumulate=accumulate,
        node_dtype=node_dtype,
    )
