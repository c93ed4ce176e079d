"""The two-level transport between nodes with different numbers of ranks.

Shards are one per rank, as everywhere, and lie in rank order. A shard of another node has no counterpart here, so ranks
of this node carry it (``plan.carriers``).

    all_gather       carriers: what they carry, from its owners | node: what each rank has, to all of it
    reduce_scatter   node: partial sums of what a carrier carries, and of its own shard | owners: summed over nodes

Each element crosses once to each node that has not got it, as between equal nodes. The sum has the order of the flat
transport, and its bits: a tree over each node's ranks, rounded once, then a tree over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import steps
from hpczero.comm.devices import Reach, StepsUnderWay
from hpczero.comm.hierarchical import Hierarchical, Inside
from hpczero.comm.inside import NodeLevel, Parts
from hpczero.comm.rails import Rails, Selection, sum_of_node
from hpczero.comm.window import Window
from hpczero.errors import ConfigError, TopologyError
from hpczero.job.group import Group, told_all
from hpczero.kernels.tree_sum import ShardSum
from hpczero.memory.buffers import Memory, Scratch, Use
from hpczero.plan.footprint import (
    EXCHANGE_BYTES,
    Carriers,
    Footprint,
    Piece,
    gather_round,
    rail_chunk,
    rail_turns,
)
from hpczero.plan.layout import Coding

# The node level by messages where nodes have different numbers of ranks: parts are pieces that lie apart.
#
# A rank's part of a buffer is its own shard and what it carries for the other nodes (``plan.carriers``). Ranks of a
# node ask for elements anywhere, each for others, so each tells the others first what it asks for.


class UnevenMessages(NodeLevel):
    """Private buffers and MPI messages, on nodes with different numbers of ranks."""

    title = "messages"
    most_nbytes = EXCHANGE_BYTES
    reads_peers = False

    def __init__(
        self,
        node: MPI.Intracomm,
        memory: Memory,
        *,
        carriers: Carriers,
        chunk_nbytes: int,
        reach: Reach,
    ) -> None:
        """Not collective; ``node`` is borrowed. ``carriers`` says who carries what, as this rank sees it."""
        super().__init__(node, memory, device=reach.accelerator.device)
        self._carriers = carriers
        self._chunk_nbytes = chunk_nbytes
        self._line = StepsUnderWay(node, reach)
        self._received = Scratch(memory, category="exchange", device=self.device)

    def _brought(self, local: int, shard_numel: int) -> list[tuple[int, int]]:
        """(first element, number) of what a rank of this node has of a gathered buffer before its peers have it."""
        carriers = self._carriers
        found = [(carriers.nodes[carriers.node][local] * shard_numel, shard_numel)]
        for far in range(len(carriers.nodes)):
            if far != carriers.node:
                for piece in carriers.carried(local, far, shard_numel):
                    found.append((piece.rank * shard_numel + piece.start, piece.numel))
        return found

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        size, me, item = self.comm.size, self.comm.rank, full.element_size()
        shard_numel, flat = full.numel() // self._carriers.shards, full.view(torch.uint8)
        for distance in range(1, size):
            target, source = (me + distance) % size, (me - distance) % size
            for move, local, peer in (
                (self._line.send, me, target),
                (self._line.receive, source, source),
            ):
                for first, numel in self._brought(local, shard_numel):
                    brought = flat[first * item : (first + numel) * item]
                    for piece in torch.split(brought, self._chunk_nbytes):
                        if len(piece):
                            move(piece, peer)
            self._line.step()
        self._line.wait()
        return None

    @contextmanager
    @override
    def reading(self, full: Tensor) -> Iterator[Parts]:
        size, me = self.comm.size, self.comm.rank

        def parts(start: int, count: int) -> list[Tensor]:
            if size == 1:
                return [full[start : start + count]]
            asked = np.empty((size, 2), dtype=np.int64)
            self.comm.Allgather(np.array([start, count], dtype=np.int64), asked)
            rows = list(self._received.get((size - 1) * count, full.dtype).view(size - 1, count))
            rows.insert(me, full[start : start + count])
            for distance in range(1, size):
                target, source = (me + distance) % size, (me - distance) % size
                begin, numel = map(int, asked[target])
                if numel:
                    self._line.send(full[begin : begin + numel], target)
                if count:
                    self._line.receive(rows[source], source)
                self._line.step()
            self._line.wait()
            return rows

        yield parts

    @override
    def close(self) -> None:
        """Give the memory to receive into back. Not collective."""
        self._received.release()


# The level between nodes with different numbers of ranks: every rank sends what it carries to those who own it.
#
#     gather    owner -> carriers of its shard on each other node, in place
#     reduce    carrier sums what its node has of a piece -> owner, who sums over nodes
#
# Nodes meet in pairs, step by step, as ranks do in ``algorithms.pairwise``: with distance d, node a sends to node a + d
# and receives from node a - d. All carriers of a node have something to send in each round, so all connections are
# used.

# Divisions that are remembered: a few for each pair of a node and a size of shard.
REMEMBERED = 2**16


class Carried(Rails):
    """What this rank carries. The other ranks of its node carry the rest at the same time.

    ``comm`` has all ranks, in the order of their shards. Pairs are the only algorithm of ``selection``.
    """

    def __init__(
        self, comm: MPI.Intracomm, memory: Memory, *, carriers: Carriers, **how: Any
    ) -> None:
        """Not collective. ``carriers`` says who carries what, as this rank sees it; other arguments as of Rails.

        Raises:
            ConfigError: another algorithm than pairs; on every rank.
        """
        self._carriers = carriers
        super().__init__(comm, memory, local_size=carriers.size, local_rank=carriers.local, **how)
        self._gathered, self._reductions = (StepsUnderWay(comm, self._reach) for _ in range(2))
        self._mine = lru_cache(REMEMBERED)(partial(carriers.carried, carriers.local))
        self._takers = lru_cache(REMEMBERED)(carriers.takers)
        self._most_pieces = lru_cache(REMEMBERED)(carriers.most_pieces)

    @override
    def select(self, selection: Selection) -> None:
        if others := sorted(selection.algorithms - {"pairwise"}):
            sizes = sorted({len(ranks) for ranks in self._carriers.nodes})
            raise ConfigError(
                f"algorithms: got {', '.join(others)}, expected pairwise: nodes have {', '.join(map(str, sizes))} "
                "ranks, and no other one works where these differ; leave it to auto, or start the same number of ranks "
                "on every node"
            ).on_all_ranks()  # the same names and nodes everywhere
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
        return self._gathered.sent, self._reductions.sent

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
        item, flat, line = full.element_size(), full.view(torch.uint8), self._gathered
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
        into: ShardSum,
        dtype: torch.dtype,
        *,
        spans: bool = True,
    ) -> None:
        nodes, me = len(self._carriers.nodes), self._carriers.node
        wire, shard_numel, line = self.wire(dtype), into.out.numel(), self._reductions
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
                    used = self._send(parts, send, far, start, count, into)
                    send = send[used:]
                line.step()
                if not number:
                    line.wait(left=1)  # the round before is complete
                    left()
            mine = self.comm.rank * shard_numel + start
            sum_of_node(parts(mine, count), receive[me], self.comm, into)
            left = partial(self._sum_nodes, list(receive.unbind()), into, start)
        line.wait()
        left()

    def _send(
        self, parts: Parts, send: Tensor, far: int, start: int, count: int, into: ShardSum
    ) -> int:
        """Sum over the ranks of this node what this one carries for node ``far``, and send it.

        The result is how many elements of ``send`` it took.
        """
        used, pieces = 0, self._mine(far, count)
        for piece in pieces:
            begin = piece.rank * into.out.numel() + start + piece.start
            total = send[used : used + piece.numel]
            assert total.numel() == piece.numel, "the buffer holds what a round sends"
            sum_of_node(parts(begin, piece.numel), total, self.comm, into)
            self._reductions.send(total, piece.rank)
            used += piece.numel
        for _ in range(self._most_pieces(far, count) - len(pieces)):
            parts(0, 0)  # peers of the node ask for more pieces
        return used


class Uneven(Hierarchical):
    """``Hierarchical`` on nodes of different sizes; ``inside="ipc"`` and ``secondary`` need equal nodes."""

    sends_codes = False
    _rails: Carried

    @override
    def _check_nodes(self, group: Group, inside: Inside, *, secondary: bool) -> None:
        problem = ""
        if group.is_rectangular:
            problem = (
                f"all {group.num_nodes} node(s) have {group.local_size} rank(s), expected different numbers; use "
                "Hierarchical"
            )
        elif inside == "ipc":
            problem = (
                f"{_sizes(group)}, and ranks read each other's device memory on equal nodes only; leave the transport "
                "to auto, or start the same number of ranks on every node"
            )
        elif secondary:
            problem = (
                f"{_sizes(group)}, and a secondary copy of parameters in each node needs equal ones; leave it out, or "
                "start the same number of ranks on every node"
            )
        if problem:
            raise told_all(TopologyError(problem), group.comm)

    @override
    def _comm_between(self, group: Group) -> MPI.Intracomm:
        return group.ordered

    @cached_property
    def _carriers(self) -> Carriers:
        found = carriers_of(self.group)
        assert found is not None, "checked"
        return found

    @override
    def _level_between(self, comm: MPI.Intracomm, selection: Selection) -> Carried:
        return Carried(
            comm,
            self.memory,
            carriers=self._carriers,
            node_dtype=self.node_dtype,
            selection=selection,
            chunk_nbytes=self._chunk_nbytes,
            reach=self.reach,
        )

    @override
    def _messages_inside(self, node: MPI.Intracomm) -> NodeLevel:
        return UnevenMessages(
            node,
            self.memory,
            carriers=self._carriers,
            chunk_nbytes=self._chunk_nbytes,
            reach=self.reach,
        )

    @override
    def _level(
        self, inside: Inside, group: Group, messages: NodeLevel, *, shares_wholes: bool
    ) -> NodeLevel:
        if inside == "messages":
            return messages
        # Where one node shares memory all do, a node of one rank too: they agree on whether there is enough of it.
        return Window(
            self, messages, overlap=self._background is not None, shares_wholes=shares_wholes
        )

    @property
    @override
    def footprint(self) -> Footprint:
        carriers = replace(self._carriers, shares=self._node.reads_peers)
        return replace(super().footprint, carriers=carriers)

    @override
    def _sent_nbytes(
        self, full: Tensor, shard_numel: int, use: Use, coding: Coding | None = None
    ) -> int:
        carriers, item = self._carriers, full.element_size()
        shared = self._node.shares(full, use)
        if use is Use.GATHER:
            brought = shard_numel + carriers.carried_numel(shard_numel)
            inside = 0 if shared else (carriers.size - 1) * brought
            return ((self._nodes - 1) * shard_numel + inside) * item
        wire = self._rails.wire(full.dtype)
        reduced = self._rails.reduced_numel(shard_numel, wire) if shard_numel else 0
        inside = 0 if shared else (carriers.shards - 1) * shard_numel - reduced
        return reduced * wire.itemsize + inside * item


def carriers_of(group: Group) -> Carriers | None:
    """Who carries what between the nodes of ``group``, as this rank sees it. None for equal nodes. Not collective."""
    if group.is_rectangular:
        return None
    return Carriers(group.nodes, group.node_index, group.local_rank)


def _sizes(group: Group) -> str:
    counts = [len(ranks) for ranks in group.nodes]
    return f"nodes have different numbers of ranks ({min(counts)} to {max(counts)})"
