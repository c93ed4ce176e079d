"""Bytes on the wire, unit by unit.

Owns: the count of collectives and of elements sent. Must not know: torch, MPI, any transport beyond what its ranks
hold together (``Footprint``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpczero.plan.footprint import Footprint
from hpczero.plan.layout import Codec, ShardLayout
from hpczero.plan.rounds import gather_messages, gather_round, rail_chunk, rail_messages

FP32_BYTES = 4


@dataclass(frozen=True)
class TrafficPlan:
    """What one rank sends. Elements and bytes include padding; ``padding`` is the number of elements of it.

    ``messages`` are those between nodes, by pairs of nodes and in rounds of the usual length.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_gather_numel: int = 0
    reduce_scatter_numel: int = 0
    all_gather_nbytes: int = 0
    reduce_scatter_nbytes: int = 0
    padding: int = 0
    messages: int = 0

    def __add__(self, other: TrafficPlan) -> TrafficPlan:
        return TrafficPlan(
            self.all_gathers + other.all_gathers,
            self.reduce_scatters + other.reduce_scatters,
            self.all_gather_numel + other.all_gather_numel,
            self.reduce_scatter_numel + other.reduce_scatter_numel,
            self.all_gather_nbytes + other.all_gather_nbytes,
            self.reduce_scatter_nbytes + other.reduce_scatter_nbytes,
            self.padding + other.padding,
            self.messages + other.messages,
        )

    @property
    def numel(self) -> int:
        """Elements sent, padding included."""
        return self.all_gather_numel + self.reduce_scatter_numel

    @property
    def nbytes(self) -> int:
        """Bytes sent, padding included."""
        return self.all_gather_nbytes + self.reduce_scatter_nbytes


def unit_traffic(
    layout: ShardLayout,
    *,
    codec: Codec | None = None,
    shards_parameters: bool,
    shards_optimizer: bool,
    trainable: bool,
    param_itemsize: int,
    node_itemsize: int,
    footprint: Footprint,
    micro_steps: int,
    synced: int,
) -> TrafficPlan:
    """What one rank sends for one unit in one optimizer step.

    Sharded parameters are gathered for forward and again for backward, in every micro step, unless the node keeps them
    whole. Otherwise one gather follows the update, of the updated parameters. With a replicated optimizer a gather of
    the reduced fp32 gradient follows every reduction instead. Partial sums travel between nodes in the dtype they are
    rounded to. Of codes, elements are those of the parameters, and bytes those of the codes.
    """
    shards, shard, nodes = layout.num_shards, layout.shard_numel, footprint.nodes
    if codec is not None and shard:
        words = codec.words(shard)
        of_codes = unit_traffic(
            ShardLayout.pack([("codes", (words * shards,))], shards, align=1),
            shards_parameters=shards_parameters,
            shards_optimizer=shards_optimizer,
            trainable=False,
            param_itemsize=FP32_BYTES,
            node_itemsize=node_itemsize,
            footprint=footprint,
            micro_steps=micro_steps,
            synced=0,
        )
        numel = of_codes.all_gather_numel * shard // words
        padding = layout.padded_numel - layout.numel
        return replace(
            of_codes, all_gather_numel=numel, padding=numel * padding // layout.padded_numel
        )
    wire = min(param_itemsize, node_itemsize) if shards == nodes else node_itemsize
    way = _way(footprint, shards, shard, wire)
    shared = footprint.reads_peers
    reductions = synced if trainable else 0
    if shards_parameters and not footprint.lasting:
        gathers, gather_itemsize = 2 * micro_steps, param_itemsize
    elif shards_optimizer:
        gathers, gather_itemsize = int(trainable), param_itemsize
    else:
        gathers, gather_itemsize = reductions, FP32_BYTES
    gathered = way.gathered + (0 if shared and shards_optimizer else way.gathered_inside)
    reduced_inside = 0 if shared else way.reduced_inside
    reduced = way.reduced + reduced_inside
    reduced_nbytes = reduced_inside * param_itemsize + way.reduced * wire
    total, padding = layout.padded_numel, layout.padded_numel - layout.numel
    sent = gathers * gathered + reductions * reduced
    messages = 0
    if shard and nodes > 1:
        messages += gathers * _gather_messages(footprint, shard, gather_itemsize)
        messages += reductions * _reduce_messages(footprint, shard, wire)
    return TrafficPlan(
        all_gathers=gathers,
        reduce_scatters=reductions,
        all_gather_numel=gathers * gathered,
        reduce_scatter_numel=reductions * reduced,
        all_gather_nbytes=gathers * gathered * gather_itemsize,
        reduce_scatter_nbytes=reductions * reduced_nbytes,
        padding=sent * padding // total if total else 0,
        messages=messages,
    )


@dataclass(frozen=True)
class _Way:
    """Elements that one rank sends for a unit: in a gather and in a reduction, to other nodes and inside its own."""

    gathered: int
    gathered_inside: int
    reduced: int
    reduced_inside: int


def _way(footprint: Footprint, shards: int, shard: int, wire: int) -> _Way:
    carriers, between = footprint.carriers, (footprint.nodes - 1) * shard
    if carriers is None:
        inside = (shards - footprint.nodes) * shard  # together (N-1)/N of the padded unit
        return _Way(between, inside, between, inside)
    # Its own shard goes to each other node once. Peers get that and what it carries, and give what it sums.
    brought = (carriers.size - 1) * (shard + carriers.carried_numel(shard))
    chunk = rail_chunk(shard, footprint.nodes, wire, footprint.round_nbytes)
    reduced = carriers.reduced_numel(shard, chunk)
    return _Way(between, brought, reduced, (shards - 1) * shard - reduced)


def _gather_messages(footprint: Footprint, shard: int, itemsize: int) -> int:
    if footprint.carriers is not None:
        most = gather_round(shard * itemsize, footprint.nodes, footprint.round_nbytes)
        return footprint.carriers.gather_messages(shard, itemsize, most)
    return gather_messages(shard * itemsize, footprint.nodes, footprint.round_nbytes)


def _reduce_messages(footprint: Footprint, shard: int, wire: int) -> int:
    if footprint.carriers is not None:
        chunk = rail_chunk(shard, footprint.nodes, wire, footprint.round_nbytes)
        return footprint.carriers.reduce_messages(shard, chunk)
    return rail_messages(shard, footprint.nodes, wire, footprint.round_nbytes)
