"""Bytes on the wire, unit by unit.

Owns: the count of collectives and of elements sent. Must not know: torch, MPI, any transport beyond what its ranks
hold together (``Footprint``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.plan.footprint import Footprint
from hpczero.plan.layout import ShardLayout
from hpczero.plan.rounds import gather_messages, rail_messages

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
    rounded to.
    """
    shards, shard, nodes = layout.num_shards, layout.shard_numel, footprint.nodes
    between, inside = (
        (nodes - 1) * shard,
        (shards - nodes) * shard,
    )  # together (N-1)/N of the padded unit
    shared = footprint.ranks > 1
    reductions = synced if trainable else 0
    if shards_parameters and not footprint.lasting:
        gathers, gather_itemsize = 2 * micro_steps, param_itemsize
    elif shards_optimizer:
        gathers, gather_itemsize = int(trainable), param_itemsize
    else:
        gathers, gather_itemsize = reductions, FP32_BYTES
    gathered = between if shared and shards_optimizer else between + inside
    reduced_inside = 0 if shared else inside
    reduced = between + reduced_inside
    wire = min(param_itemsize, node_itemsize) if shards == nodes else node_itemsize
    reduced_nbytes = reduced_inside * param_itemsize + between * wire
    total, padding = layout.padded_numel, layout.padded_numel - layout.numel
    sent = gathers * gathered + reductions * reduced
    messages = 0
    if shard and nodes > 1:
        rail = (nodes, footprint.round_nbytes)
        messages += gathers * gather_messages(shard * gather_itemsize, *rail)
        messages += reductions * rail_messages(shard, nodes, wire, footprint.round_nbytes)
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
