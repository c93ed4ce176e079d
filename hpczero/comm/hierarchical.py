"""The two-level transport: rails between nodes, a node level inside.

Owns: which level goes first, the pieces in which they overlap, and where partial sums are rounded. Must not know: how
a level moves bytes, units, stages.

With G nodes of L ranks, rank (node g, local l) owns shard l*G + g. Rail l joins the ranks with local rank l.

    all_gather       rail: shards l*G .. l*G+G-1, contiguous | node: parts l = 0 .. L-1, contiguous
    reduce_scatter   node: partial sums of part l, slice by slice | rail: slice g goes to node g, summed there

Each byte crosses the network once, over every rank's own connection at once, and no buffer is reordered. Source:
docs/performance.md has the bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hpczero.comm.algorithms import Exchange, Gather, PairwiseExchange, RingGather
from hpczero.comm.arena import IN_TURN
from hpczero.comm.base import Collectives, Work
from hpczero.comm.blocks import CHUNK_BYTES, Blocks
from hpczero.comm.node import Messages, NodeLevel, Parts
from hpczero.comm.window import Window
from hpczero.device import Buffer, Memory, Scratch, Use
from hpczero.errors import TopologyError
from hpczero.kernels.tree_sum import PIECE_NUMEL, tree_sum
from hpczero.layout import Sharing, rail_chunk
from hpczero.topology import Topology

# Sums in shared memory that a rank may put off: it need not wait for peers that are this many units behind.
PUT_OFF = IN_TURN - 1


class Hierarchical(Collectives):
    """All-gather between nodes first, reduce-scatter inside nodes first; one node or one rank per node will do."""

    def __init__(
        self,
        topology: Topology,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        gather: type[Gather] = RingGather,
        exchange: type[Exchange] = PairwiseExchange,
        shared_memory: bool = True,
        chunk_nbytes: int = CHUNK_BYTES,
    ) -> None:
        """Collective.

        Args:
            topology: as in Collectives; every node has the same number of ranks.
            strict: as in Collectives.
            memory: as in Collectives.
            node_dtype: as in Collectives.
            gather: algorithm between nodes.
            exchange: algorithm between nodes.
            shared_memory: ranks of a node share a window; False: they send messages.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.

        Raises:
            TopologyError: nodes with different numbers of ranks.
            CommError: no shared memory; on every rank.
        """
        if topology.rail is None:
            error = TopologyError(
                "nodes have different numbers of ranks, so there are no rails; use the flat transport, or start the "
                "same number of ranks on every node"
            )
            error.agreed = True
            raise error
        super().__init__(topology, strict=strict, memory=memory, node_dtype=node_dtype)
        self._rail = topology.rail
        self._chunk_nbytes = chunk_nbytes
        self._gather = gather(self._rail, chunk_nbytes=chunk_nbytes)
        self._exchange = exchange(self._rail, chunk_nbytes=chunk_nbytes)
        self._scratch = Scratch(self.memory, category="exchange")
        messages = Messages(topology.node, self.memory, chunk_nbytes=chunk_nbytes)
        shares = shared_memory and topology.node.size > 1
        self._put_off: deque[Work] = deque()
        self._node: NodeLevel = messages
        if shares:
            self._node = Window(
                topology, self.memory, messages, drain=lambda: self._finish_until(None)
            )

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        category: str,
        use: Use = Use.PRIVATE,
        keep: bool = False,
    ) -> Buffer:
        """See ``Collectives``."""
        return self._node.allocate(numel, dtype, category=category, use=use, keep=keep)

    @property
    def sharing(self) -> Sharing:
        """See ``Collectives``."""
        nodes = self._rail.size
        if isinstance(self._node, Window):
            return Sharing(self._node.comm.size, lasting=nodes == 1, nodes=nodes)
        return Sharing(nodes=nodes)

    def describe(self) -> str:
        """See ``Collectives``."""
        inside = "shared memory" if isinstance(self._node, Window) else "messages"
        if self._rail.size == 1:
            return f"{inside} on one node"
        return f"all-gather {self._gather.name}, exchange {self._exchange.name} between nodes; {inside} inside"

    def settle(self) -> None:
        """See ``Collectives``."""
        self._node.settle()

    def _sent_nbytes(self, full: Tensor, shard_numel: int, use: Use) -> int:
        nodes, local = self._rail.size, self.topology.node.size
        inside = 0 if self._node.shares(full, use) else (local - 1) * nodes * full.element_size()
        between = self._wire(full.dtype) if use is Use.REDUCE else full.dtype
        return ((nodes - 1) * between.itemsize + inside) * shard_numel

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which a node's partial sums of ``dtype`` travel."""
        # One rank per node has nothing to add up: its gradient travels as it is, if that is not wider.
        alone = self.topology.node.size == 1 and dtype.itemsize <= self.node_dtype.itemsize
        return dtype if alone else self.node_dtype

    def _all_gather(self, full: Tensor, shard_numel: int, name: str) -> Work:
        nodes, local = self._rail.size, self.topology.local_rank
        start = local * nodes * shard_numel
        self._gather(Blocks.of(full, start, shard_numel, shard_numel, nodes))
        rest = self._node.spread(full)
        return Work(name) if rest is None else self._later("all_gather", name, rest)

    def _reduce_scatter(
        self, full: Tensor, out: Tensor, shard_numel: int, scale: float, accumulate: bool, name: str
    ) -> Work:
        reading = self._node.reading(full)
        dtype = full.dtype

        def finish() -> None:
            with reading as parts:
                if self._rail.size == 1:
                    self._sum_in_node(parts, out, dtype.itemsize, scale, accumulate)
                else:
                    self._sum_over_nodes(parts, out, dtype, scale, accumulate)

        if self._rail.size > 1 or not self._node.shares(full, Use.REDUCE):
            finish()
            return Work(name)
        work = self._later("reduce_scatter", name, finish)
        self._put_off.append(work)
        while len(self._put_off) > PUT_OFF:
            self._put_off.popleft().wait()
        return Work(name, lambda: self._finish_until(work))

    def _finish_until(self, work: Work | None) -> None:
        """Finish what was put off, oldest first, up to ``work``; everything for None."""
        while self._put_off and (work is None or work in self._put_off):
            self._put_off.popleft().wait()

    def _sum_in_node(
        self, parts: Parts, out: Tensor, itemsize: int, scale: float, accumulate: bool
    ) -> None:
        local = range(self.topology.node.size)
        most = min(self._chunk_nbytes, self._node.most_nbytes // len(local))
        chunk = max(most // itemsize, 1)
        for start in range(0, out.numel(), chunk):
            count = min(chunk, out.numel() - start)
            tree_sum(
                parts(start, count),
                out[start : start + count],
                groups=[local],
                scale=scale,
                accumulate=accumulate,
            )

    def _sum_over_nodes(
        self, parts: Parts, out: Tensor, dtype: torch.dtype, scale: float, accumulate: bool
    ) -> None:
        nodes, local = self._rail.size, range(self.topology.node.size)
        wire = self._wire(dtype)
        shard_numel = out.numel()
        most = max(self._chunk_nbytes // wire.itemsize, 1)
        chunk = min(rail_chunk(shard_numel, nodes, wire.itemsize), most)
        buffers = self._scratch.get(2 * 2 * nodes * chunk, wire).view(2, 2, nodes * chunk)
        sums = torch.empty(PIECE_NUMEL)
        left: Callable[[], None] = lambda: None  # noqa: E731  (what the chunk before still needs)

        for turn, start in enumerate(range(0, shard_numel, chunk)):
            count = min(chunk, shard_numel - start)
            send, receive = buffers[turn % 2, :, : nodes * count]

            def prepare(
                node: int, start: int = start, count: int = count, send: Tensor = send
            ) -> None:
                blocks = parts(node * shard_numel + start, count)
                into = send[node * count : (node + 1) * count]
                for begin in range(0, count, PIECE_NUMEL):
                    piece = slice(begin, min(begin + PIECE_NUMEL, count))
                    total = sums[: piece.stop - piece.start]
                    tree_sum([block[piece] for block in blocks], total, groups=[local], scale=1.0)
                    into[piece].copy_(total)
                    self._rail.Iprobe()  # messages of earlier steps go on only inside MPI

            self._exchange(
                Blocks.of(send, 0, count, count, nodes),
                Blocks.of(receive, 0, count, count, nodes),
                prepare=prepare,
                meanwhile=left,
            )
            left = partial(
                self._sum_nodes, send, receive, out[start : start + count], scale, accumulate
            )
        self._exchange.finish()
        left()

    def _sum_nodes(
        self, sent: Tensor, received: Tensor, out: Tensor, scale: float, accumulate: bool
    ) -> None:
        """Sum one chunk of all nodes' partial sums; this node's own never left."""
        nodes, me = self._rail.size, self._rail.rank
        rows = list(received.view(nodes, -1).unbind())
        rows[me] = sent.view(nodes, -1)[me]
        tree_sum(
            rows,
            out,
            groups=[[node] for node in range(nodes)],
            scale=scale,
            accumulate=accumulate,
            node_dtype=self.node_dtype,
        )

    def close(self) -> None:
        """Free counters, datatypes and scratch. Collective."""
        self._finish_until(None)
        self._gather.free()
        self._exchange.free()
        self._node.close()
        self._scratch.release()
        super().close()
