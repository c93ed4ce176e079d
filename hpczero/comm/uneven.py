"""The two-level transport between nodes with different numbers of ranks.

Owns: what is refused there, and what this rank sends. Must not know: who carries what, how a level moves bytes, units.

Shards are one per rank, as everywhere, and lie in rank order. A shard of another node has no counterpart here, so ranks
of this node carry it (``plan.carriers``).

    all_gather       carriers: what they carry, from its owners | node: what each rank has, to all of it
    reduce_scatter   node: partial sums of what a carrier carries, and of its own shard | owners: summed over nodes

Each element crosses once to each node that has not got it, as between equal nodes. The sum has the order of the flat
transport, and its bits: a tree over each node's ranks, rounded once, then a tree over nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.between.carried import Carried
from hpczero.comm.between.selection import Selection
from hpczero.comm.hierarchical import Hierarchical, Inside
from hpczero.comm.inside.level import NodeLevel
from hpczero.comm.inside.pieces import Pieces
from hpczero.errors import TopologyError
from hpczero.job.group import Group
from hpczero.memory.buffers import Use
from hpczero.plan.footprint import Carriers, Footprint


class Uneven(Hierarchical):
    """As ``Hierarchical``, whose options it has, on nodes of any sizes that are not all equal.

    ``inside="ipc"`` and ``secondary`` need equal nodes.
    """

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
            error = TopologyError(problem)
            error.agreed = group.is_job
            raise error

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
        return Pieces(
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
        return self._window(group, messages, shares_wholes=shares_wholes)

    @property
    @override
    def footprint(self) -> Footprint:
        carriers = replace(self._carriers, shares=self._node.reads_peers)
        return replace(super().footprint, carriers=carriers)

    @override
    def _sent_nbytes(self, full: Tensor, shard_numel: int, use: Use) -> int:
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
    """Who carries what between the nodes of ``group``, as this rank sees it. Not collective.

    None where nodes have equal numbers of ranks.
    """
    if group.is_rectangular:
        return None
    return Carriers(group.nodes, group.node_index, group.local_rank)


def _sizes(group: Group) -> str:
    counts = [len(ranks) for ranks in group.nodes]
    return f"nodes have different numbers of ranks ({min(counts)} to {max(counts)})"
