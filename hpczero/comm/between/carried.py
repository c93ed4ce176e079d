"""The level between nodes with different numbers of ranks: every rank sends what it carries to those who own it.

Owns: the messages, the rounds in which sums and messages overlap, the dtype of partial sums on the network. Must not
know: who carries what (``plan.carriers``), how the ranks of a node share, units, stages.

    gather    owner -> carriers of its shard on each other node, in place
    reduce    carrier sums what its node has of a piece -> owner, who sums over nodes

Nodes meet in pairs, step by step, as ranks do in ``algorithms.pairwise``: with distance d, node a sends to node a + d
and receives from node a - d. All carriers of a node have something to send in each round, so all connections are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms.blocks import CHUNK_BYTES
from hpczero.comm.algorithms.pairwise import steps
from hpczero.comm.between.level import BetweenLevel
from hpczero.comm.between.rails import sum_of_node, sum_of_nodes
from hpczero.comm.between.selection import DEFAULT, Selection
from hpczero.comm.devices.access import HostReach, Reach
from hpczero.comm.devices.line import Line
from hpczero.comm.inside.level import Parts
from hpczero.errors import ConfigError
from hpczero.memory.buffers import Memory, Scratch
from hpczero.plan.footprint import Carriers, Piece
from hpczero.plan.rounds import gather_round, rail_chunk, rail_turns

# Divisions that are remembered: a few for each pair of a node and a size of shard.
REMEMBERED = 2**16


class Carried(BetweenLevel):
    """What this rank carries. The other ranks of its node carry the rest at the same time.

    Attributes:
        comm: all ranks, in the order of their shards; borrowed.
        selection: in rounds of how many bytes pieces travel; pairs are the only algorithm.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: Memory,
        *,
        carriers: Carriers,
        node_dtype: torch.dtype,
        selection: Selection = DEFAULT,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Not collective.

        Args:
            comm: must outlive this object. It carries nothing else while bytes move.
            memory: ledger of buffers.
            carriers: who carries what, as this rank sees it.
            node_dtype: each node's partial sum is rounded to it, and travels in it.
            selection: equal on all ranks.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.
            reach: as in Collectives.

        Raises:
            ConfigError: another algorithm than pairs; on every rank.
        """
        self.comm = comm
        self._carriers = carriers
        self._node_dtype = node_dtype
        self._chunk_nbytes = chunk_nbytes
        reach = reach or HostReach()
        self._scratch = Scratch(memory, category="exchange", device=reach.accelerator.device)
        self._gathers, self._reductions = Line(comm, reach), Line(comm, reach)
        self._mine = lru_cache(REMEMBERED)(partial(carriers.carried, carriers.local))
        self._takers = lru_cache(REMEMBERED)(carriers.takers)
        self._most_pieces = lru_cache(REMEMBERED)(carriers.most_pieces)
        self.select(selection)

    @override
    def select(self, selection: Selection) -> None:
        names = {choice.algorithm for choice in (*selection.gathers, *selection.exchanges)}
        if others := sorted(names - {"pairwise"}):
            sizes = sorted({len(ranks) for ranks in self._carriers.nodes})
            error = ConfigError(
                f"algorithms: got {', '.join(others)}, expected pairwise: nodes have {', '.join(map(str, sizes))} "
                "ranks, and no other one works where these differ; leave it to auto, or start the same number of ranks "
                "on every node"
            )
            error.agreed = True  # the same names and nodes everywhere
            raise error
        self.selection = selection

    @override
    def wire(self, dtype: torch.dtype) -> torch.dtype:
        return self._node_dtype

    @override
    def describe(self) -> str:
        sizes = [len(ranks) for ranks in self._carriers.nodes]
        return f"between nodes of {min(sizes)} to {max(sizes)} ranks {self.selection.describe()}"

    @property
    @override
    def messages(self) -> tuple[int, int]:
        return self._gathers.sent, self._reductions.sent

    def reduced_numel(self, shard_numel: int, wire: torch.dtype) -> int:
        """Elements that this rank sends in a reduction of shards of ``shard_numel``. Not collective."""
        return self._carriers.reduced_numel(shard_numel, self._chunk(shard_numel, wire))

    def _chunk(self, shard_numel: int, wire: torch.dtype) -> int:
        """Elements of each shard in one round of a reduction."""
        item, nodes = wire.itemsize, len(self._carriers.nodes)
        wished = self.selection.exchange_for(shard_numel * item).chunk_nbytes
        chunk = rail_chunk(shard_numel, nodes, item, wished)
        return max(min(chunk, self._chunk_nbytes // item), 1)

    @override
    def gather(self, full: Tensor, shard_numel: int) -> None:
        item, flat, line = full.element_size(), full.view(torch.uint8), self._gathers
        nodes, me, own = len(self._carriers.nodes), self._carriers.node, self.comm.rank
        wished = self.selection.gather_for(shard_numel * item).chunk_nbytes
        most = min(gather_round(shard_numel * item, nodes, wished), self._chunk_nbytes)

        def bytes_of(owner: int, piece: Piece, turn: int) -> Tensor:
            begin = (owner * shard_numel + piece.start) * item + turn * most
            end = (owner * shard_numel + piece.start + piece.numel) * item
            return flat[begin : max(min(begin + most, end), begin)]

        for turn in range(-(-shard_numel * item // most)):
            for distances in steps(nodes):
                for distance in distances:
                    far, near = (me + distance) % nodes, (me - distance) % nodes
                    for piece in self._mine(near, shard_numel):
                        if len(came := bytes_of(piece.rank, piece, turn)):
                            line.receive(came, piece.rank)
                    for piece in self._takers(far, shard_numel):
                        if len(leaves := bytes_of(own, piece, turn)):
                            line.send(leaves, piece.rank)
                line.step()
        line.wait()

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
        nodes, me = len(self._carriers.nodes), self._carriers.node
        wire, shard_numel, line = self.wire(dtype), out.numel(), self._reductions
        chunk = self._chunk(shard_numel, wire)
        turns = rail_turns(shard_numel, chunk)
        whole = self._scratch.get(self._carriers.exchange_numel(shard_numel, chunk), wire)
        buffers = whole.view(turns, -1)
        left: Callable[[], None] = lambda: None  # noqa: E731  (what the round before still needs)

        for turn, start in enumerate(range(0, shard_numel, chunk)):
            count = min(chunk, shard_numel - start)
            receive = buffers[turn % turns, : nodes * count].view(nodes, count)
            send = buffers[turn % turns, nodes * chunk :]
            for number, distances in enumerate(steps(nodes)):
                for distance in distances:
                    far, near = (me + distance) % nodes, (me - distance) % nodes
                    for piece in self._takers(near, count):
                        came = receive[near, piece.start : piece.start + piece.numel]
                        line.receive(came, piece.rank)
                    used = self._send(parts, send, far, start, count, shard_numel)
                    send = send[used:]
                line.step()
                if not number:
                    line.wait(left=1)  # the round before is complete
                    left()
            mine = self.comm.rank * shard_numel + start
            sum_of_node(parts(mine, count), receive[me], self.comm)
            left = partial(
                sum_of_nodes,
                list(receive.unbind()),
                out[start : start + count],
                scale=scale,
                accumulate=accumulate,
                node_dtype=self._node_dtype,
            )
        line.wait()
        left()

    def _send(
        self, parts: Parts, send: Tensor, far: int, start: int, count: int, shard_numel: int
    ) -> int:
        """Sum over the ranks of this node what this one carries for node ``far``, and send it.

        Returns:
            Elements of ``send`` that it took.
        """
        used, pieces = 0, self._mine(far, count)
        for piece in pieces:
            begin = piece.rank * shard_numel + start + piece.start
            total = send[used : used + piece.numel]
            assert total.numel() == piece.numel, "the buffer holds what a round sends"
            sum_of_node(parts(begin, piece.numel), total, self.comm)
            self._reductions.send(total, piece.rank)
            used += piece.numel
        for _ in range(self._most_pieces(far, count) - len(pieces)):
            parts(0, 0)  # peers of the node ask for more pieces
        return used

    @override
    def close(self) -> None:
        self._scratch.release()
