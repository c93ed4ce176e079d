"""Bytes on the wire, unit by unit.

Owns: the count of collectives and of elements sent. Must not know: torch, MPI, the transport (a transport that moves
fewer bytes, such as a shared window, is measured against this).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.layout import ShardLayout

FP32_BYTES = 4


@dataclass(frozen=True)
class TrafficPlan:
    """What one rank sends; elements and bytes include padding, ``padding`` says how many elements that is."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_gather_numel: int = 0
    reduce_scatter_numel: int = 0
    all_gather_nbytes: int = 0
    reduce_scatter_nbytes: int = 0
    padding: int = 0

    def __add__(self, other: TrafficPlan) -> TrafficPlan:
        return TrafficPlan(
            self.all_gathers + other.all_gathers,
            self.reduce_scatters + other.reduce_scatters,
            self.all_gather_numel + other.all_gather_numel,
            self.reduce_scatter_numel + other.reduce_scatter_numel,
            self.all_gather_nbytes + other.all_gather_nbytes,
            self.reduce_scatter_nbytes + other.reduce_scatter_nbytes,
            self.padding + other.padding,
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
    micro_steps: int,
    synced: int,
) -> TrafficPlan:
    """What one rank sends for one unit in one optimizer step.

    Sharded parameters are gathered for forward and again for backward, in every micro step. Otherwise one gather
    follows:
    of the updated parameters, or, with a replicated optimizer, of the reduced fp32 gradient after every reduction.
    """
    remote = layout.padded_numel - layout.shard_numel  # (N-1)/N of the padded unit
    padding = layout.padded_numel - layout.numel
    reductions = synced if trainable else 0
    if shards_parameters:
        gathers, gather_itemsize = 2 * micro_steps, param_itemsize
    elif shards_optimizer:
        gathers, gather_itemsize = int(trainable), param_itemsize
    else:
        gathers, gather_itemsize = reductions, FP32_BYTES
    return TrafficPlan(
        all_gathers=gathers,
        reduce_scatters=reductions,
        all_gather_numel=gathers * remote,
        reduce_scatter_numel=reductions * remote,
        all_gather_nbytes=gathers * remote * gather_itemsize,
        reduce_scatter_nbytes=reductions * remote * param_itemsize,
        padding=(gathers + reductions) * padding * (layout.num_shards - 1) // layout.num_shards,
    )
