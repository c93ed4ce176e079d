"""Footprint: what a transport holds and sends beside the buffers of units, as far as the plan must know it.

Owns: the description, and the sizes of places that buffers take in turn. Must not know: MPI, torch, units. Each
transport states its own (``Collectives.footprint``); ``footprint_of`` predicts that of one that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpczero.plan.carriers import Carriers
from hpczero.plan.rounds import (
    DEVICE_ROUND_BYTES,
    ROUND_BYTES,
    exchange_chunk,
    rail_chunk,
    rail_nbytes,
)
from hpczero.plan.transports import Named

FP32_BYTES = 4
PULLED_IN_TURN = (
    2  # places that serve all whole parameters where ranks of a node pull them from each other
)
PLACE_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Footprint:
    """What the ranks of a node hold together; the default is nothing.

    Attributes:
        ranks: ranks that share one copy of whole parameters (unless it ``pulls``) and read each other's gradients.
        lasting: whether whole parameters stay in memory while sharded, because the node holds all of them anyway.
        nodes: nodes between which partial sums travel.
        round_nbytes: bytes of one partial sum that are wished to travel in one round between nodes (``plan.rounds``).
        overlap: whether collectives go on while the model computes, so that the next unit is unsharded meanwhile.
        pulls: whether each rank has whole parameters of its own, and ranks of a node only read from each other's
            memory.
        replicas: ranks that hold the same shard and sum its gradient.
        replica_nodes: nodes that they are on.
        carriers: who moves what between nodes that have different numbers of ranks; None where they have equal ones.
        replica_carriers: the same of the nodes of replicas.
    """

    ranks: int = 1
    lasting: bool = False
    nodes: int = 1
    round_nbytes: int = ROUND_BYTES
    overlap: bool = False
    pulls: bool = False
    replicas: int = 1
    replica_nodes: int = 1
    carriers: Carriers | None = None
    replica_carriers: Carriers | None = None

    @property
    def reads_peers(self) -> bool:
        """Whether gradients lie where the ranks of a node read them. A rank alone on its node does as the others."""
        return self.ranks > 1 or (self.carriers is not None and self.carriers.shares)

    def rows_of_peers(self, shards: int) -> int:
        """Rows of a round into which ranks of a node send each other gradients, of ``shards`` shards in all."""
        if self.reads_peers:
            return 0
        if self.carriers is not None:
            return self.carriers.size - 1  # its own is read where it is
        local = shards // self.nodes
        return local if local > 1 else 0

    def rail_nbytes(self, shard_numel: int, itemsize: int, *, alone: bool = False) -> int:
        """Bytes of the buffers of a reduction between nodes; arguments as of ``plan.rounds.rail_nbytes``.

        With ``alone`` a node has one rank, whose gradient has the dtype of the network; devices do not use that.
        """
        if self.carriers is not None:
            chunk = rail_chunk(shard_numel, self.nodes, itemsize, self.round_nbytes)
            return self.carriers.exchange_numel(shard_numel, chunk) * itemsize
        alone = alone and self.round_nbytes < DEVICE_ROUND_BYTES
        return rail_nbytes(shard_numel, self.nodes, itemsize, self.round_nbytes, alone=alone)

    @property
    def copies(self) -> int:
        """Number of ranks that share one copy of whole parameters."""
        return 1 if self.pulls else self.ranks

    def sums_in_place(self, num_shards: int, itemsize: int) -> bool:
        """Whether a rank collects its gradient where the mean will lie, because no other rank adds to it.

        Args:
            num_shards: ranks that share each unit.
            itemsize: bytes of an element of the gradient; the mean is fp32.
        """
        return num_shards == self.replicas == 1 and itemsize == FP32_BYTES


def replicas_nbytes(footprint: Footprint, shard_numel: int, itemsize: int) -> int:
    """Bytes in which replicas of a shard sum it: what leaves, what is whole again in fp32, and what comes.

    Args:
        footprint: of the transport.
        shard_numel: elements of the largest shard.
        itemsize: bytes of an element of a partial sum.
    """
    count = footprint.replicas
    if count == 1:
        return 0
    share = -(-shard_numel // count)
    if footprint.replica_carriers is not None:
        carriers = footprint.replica_carriers
        chunk = rail_chunk(share, footprint.replica_nodes, itemsize, footprint.round_nbytes)
        comes = (carriers.exchange_numel(share, chunk) + (carriers.size - 1) * chunk) * itemsize
    elif footprint.replica_nodes > 1:
        nodes, length = footprint.replica_nodes, footprint.round_nbytes
        alone = count == nodes and length < DEVICE_ROUND_BYTES
        comes = rail_nbytes(share, nodes, itemsize, length, alone=alone)
    else:
        comes = exchange_chunk(share, count, itemsize) * count * itemsize
    return share * count * (itemsize + FP32_BYTES) + comes


def pulled_nbytes(parts: Sequence[int]) -> int:
    """Bytes of the places through which ranks of a node hand on parts of whole parameters of these sizes."""
    return PULLED_IN_TURN * (-(-max(parts, default=0) // PLACE_ALIGNMENT) * PLACE_ALIGNMENT)


def places_in_turn(sizes: Sequence[int]) -> list[int]:
    """Bytes of the places that gradients of these sizes share on a node.

    The first has its own; two serve the others.
    """
    rest = sizes[1:]
    return [max(place, default=0) for place in (sizes[:1], rest[0::2], rest[1::2])]


def footprint_of(
    transport: Named,
    *,
    ranks: int,
    local_size: int,
    carriers: Carriers | None = None,
    on_device: bool = False,
) -> Footprint:
    """The footprint that a transport of this name will have.

    Args:
        transport: its name.
        ranks: number of ranks in the group.
        local_size: number of ranks on a node.
        carriers: of nodes with different numbers of ranks, as one rank sees them; then ``local_size`` is not used.
        on_device: whether buffers are on devices, which compute by themselves: rounds are longer, and communication
            goes on beside that on one node too. With ``ipc`` they always are.
    """
    rounds = DEVICE_ROUND_BYTES if on_device or transport == "ipc" else ROUND_BYTES
    if carriers is not None and transport in ("hierarchical", "window"):
        shares = transport == "window"
        return Footprint(
            carriers.size if shares else 1,
            nodes=len(carriers.nodes),
            round_nbytes=rounds,
            overlap=True,
            carriers=replace(carriers, shares=shares),
        )
    local, nodes = min(local_size, ranks), -(-ranks // local_size)
    if transport == "flat":
        return Footprint()
    if transport == "ipc":
        return Footprint(local, nodes=nodes, round_nbytes=rounds, overlap=True, pulls=local > 1)
    if transport == "hierarchical" or local == 1:
        return Footprint(nodes=nodes, round_nbytes=rounds, overlap=on_device or nodes > 1)
    return Footprint(local, lasting=nodes == 1, nodes=nodes, overlap=nodes > 1)
