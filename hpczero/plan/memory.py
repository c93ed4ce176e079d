"""Bytes of a plan: what a rank holds of the model at each moment, and what a step sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TYPE_CHECKING

from hpczero.plan.footprint import (
    Footprint,
    coded_chunk,
    gather_messages,
    gather_round,
    rail_chunk,
    rail_messages,
)
from hpczero.plan.layout import ShardLayout, UnitSpec
from hpczero.plan.precision import Precision

if TYPE_CHECKING:
    from hpczero.plan.plan import Plan

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
        return TrafficPlan(*map(add, vars(self).values(), vars(other).values()))

    @property
    def numel(self) -> int:
        """Elements sent, padding included."""
        return self.all_gather_numel + self.reduce_scatter_numel

    @property
    def nbytes(self) -> int:
        """Bytes sent, padding included."""
        return self.all_gather_nbytes + self.reduce_scatter_nbytes


def unit_traffic(
    plan: Plan, unit: UnitSpec, footprint: Footprint, *, micro_steps: int, synced: int
) -> TrafficPlan:
    """What one rank sends for one unit in one optimizer step.

    Sharded parameters are gathered for forward and again for backward, in every micro step, unless the node keeps them
    whole. Otherwise one gather follows the update, of the updated parameters. With a replicated optimizer a gather of
    the reduced fp32 gradient follows every reduction instead. Partial sums travel between nodes in the dtype they are
    rounded to. Of codes, elements are those of the parameters, and bytes those of the codes. Rows of tables depend on
    the batch and are not counted.
    """
    layout, codec, stage = unit.layout, unit.codec, plan.stage
    shards, shard, item = layout.num_shards, layout.shard_numel, plan.precision.param_itemsize
    total, padding = layout.padded_numel, layout.padded_numel - layout.numel
    if codec is not None and shard:
        words = codec.words(shard)
        packed = ShardLayout.pack([("codes", (words * shards,))], shards, align=1)
        codes = replace(unit, layout=packed, codec=None, trainable=False)
        fp32 = replace(plan, precision=Precision())
        of_codes = unit_traffic(fp32, codes, footprint, micro_steps=micro_steps, synced=0)
        numel = of_codes.all_gather_numel * shard // words
        return replace(of_codes, all_gather_numel=numel, padding=numel * padding // total)
    wire = plan.wire_itemsize(footprint)
    way = _way(footprint, shards, shard, wire)
    shared = footprint.reads_peers
    reductions = synced if unit.trainable and not unit.row else 0
    if unit.row and stage.shards_parameters:
        gathers, gather_itemsize = 0, item
    elif stage.shards_parameters and not footprint.lasting:
        gathers, gather_itemsize = 2 * micro_steps, item
    elif stage.shards_optimizer:
        gathers, gather_itemsize = int(unit.trainable), item
    else:
        gathers, gather_itemsize = reductions, FP32_BYTES
    gathered = way.gathered + (0 if shared and stage.shards_optimizer else way.gathered_inside)
    reduced_inside = 0 if shared else way.reduced_inside
    reduced = way.reduced + reduced_inside
    spared, coding = 0, plan.coding(unit) if footprint.nodes > 1 else None
    kept = plan.coding(unit, gathers=True) if footprint.nodes > 1 else None
    if kept is not None and stage.shards_parameters:
        # below 0: what codes save of the bytes that are counted below
        spared = (footprint.nodes - 1) * (kept.nbytes(shard) - shard * gather_itemsize)
    reduced_nbytes = reduced_inside * item + way.reduced * wire
    if coding is not None:
        chunk = coded_chunk(coding, footprint.nodes, footprint.round_nbytes)
        reduced_nbytes = reduced_inside * item + (footprint.nodes - 1) * coding.nbytes(chunk)
    sent = gathers * gathered + reductions * reduced
    messages = 0
    if shard and footprint.nodes > 1:
        messages += gathers * _gather_messages(footprint, shard, gather_itemsize)
        messages += reductions * (
            _reduce_messages(footprint, shard, wire)
            if coding is None
            else -(-shard // chunk) * (footprint.nodes - 1)
        )
    return TrafficPlan(
        all_gathers=gathers,
        reduce_scatters=reductions,
        all_gather_numel=gathers * gathered,
        reduce_scatter_numel=reductions * reduced,
        all_gather_nbytes=gathers * (gathered * gather_itemsize + spared),
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


ADAM_STATE_BYTES = 8


@dataclass(frozen=True)
class StateBytes:
    """Of one kind of optimizer.

    Attributes:
        element: bytes of an element between steps.
        blocks: whether they are codes in whole blocks, which the padding of a unit has too.
        decoded: bytes of an element of the one unit that is stepped on.
    """

    element: float
    blocks: bool = False
    decoded: int = 0

    @classmethod
    def of(cls, given: float | StateBytes) -> StateBytes:
        """A number is bytes of an element, without codes."""
        return given if isinstance(given, StateBytes) else cls(given)

    def held(self, layouts: Sequence[ShardLayout], *, sharded: bool) -> int:
        """Bytes between steps of the first rank, which has the least padding.

        Args:
            layouts: of trained units.
            sharded: whether each rank has state of its own shards alone.
        """
        if self.blocks:
            sizes = (each.shard_numel if sharded else each.padded_numel for each in layouts)
        else:
            sizes = (len(each.shard_range(0)) if sharded else each.numel for each in layouts)
        return int(self.element * sum(sizes))

    def stepping(self, layouts: Sequence[ShardLayout], *, sharded: bool) -> int:
        """Bytes beside them while the largest unit is stepped on."""
        sizes = (each.shard_numel if sharded else each.padded_numel for each in layouts)
        return self.decoded * max(sizes, default=0)


# By the name that the plan command has for an optimizer.
STATE_BYTES = {
    "adamw": StateBytes(ADAM_STATE_BYTES),
    "adamw8bit": StateBytes(17 / 8, blocks=True, decoded=8),
}
STATE_TITLES = {"adamw": "optimizer (Adam)", "adamw8bit": "optimizer (8 bits)"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank. ``unsharded``, ``exchange`` and ``stepping`` are peaks within a step; the others are always held.

    Attributes:
        parameters, master, gradients, optimizer: what training keeps.
        unsharded: whole parameters and gradients in use.
        exchange: buffers through which gradients come.
        staging: blocks through which a memory tier's bytes pass.
        away: what rests on a memory tier; in none of the sums.
        stepping: decoded state of the unit that is stepped on, when nothing is ``unsharded``.
    """

    parameters: int
    master: int
    gradients: int
    optimizer: int
    unsharded: int
    exchange: int
    staging: int = 0
    away: int = 0
    stepping: int = 0

    @property
    def states(self) -> int:
        """Bytes held between steps."""
        return self.parameters + self.master + self.gradients + self.optimizer + self.staging

    @property
    def total(self) -> int:
        """Bytes at the peak of a step, activations excluded."""
        return self.states + max(self.unsharded, self.stepping) + self.exchange


# UnitPeak: bytes that a module's units hold while it runs, and those of modules that are held together.
#
#     decoding   whole | wire of its own                          | gradients of the module before
#     running    whole | gradients of its own | the next one ahead | gradients of the module before
#
# The next module is unsharded ahead when this one is decoded: of wires there is one at a time, this module's or the
# next one's. The sums are what the ledger counts, to the byte, in a backward through modules alike. They are an upper
# bound where no module has neighbours of the largest sizes, and where ranks of a node share memory that is given back
# between uses: a rank may be through with a module that a peer still uses, and which of them is ahead depends on time.


@dataclass
class UnitPeak:
    """Bytes of the units of one module, summed by ``add``.

    Attributes:
        whole: parameters in use.
        ahead: what is there before they are in use.
        wire: codes that are there beside them while they are decoded.
        gradients: of this rank alone.
        stays: what is there as long as a peer uses them.
    """

    whole: int = 0
    ahead: int = 0
    wire: int = 0
    gradients: int = 0
    stays: int = 0

    def add(self, unit: UnitSpec, itemsize: int, footprint: Footprint, *, sharded: bool) -> None:
        """Add the parameters of one unit."""
        whole = unit.layout.padded_numel * itemsize
        if unit.rest_nbytes is not None:
            codes = unit.rest_nbytes * unit.layout.num_shards
            wire = 0 if footprint.lasting else -(-codes // footprint.copies)
            self.whole += whole  # each rank's own, on every transport
            self.ahead += wire
            self.wire = max(self.wire, wire)
        elif sharded and unit.row:
            self.whole += whole  # each rank's own, in a lookup
        elif sharded and not footprint.lasting:
            share = -(-whole // footprint.copies)
            self.whole += share
            self.ahead += share
            if footprint.copies > 1:
                self.stays += share

    @property
    def alone(self) -> int:
        """While it is decoded or runs, without other modules."""
        return self.whole + max(self.wire, self.gradients)


def largest_together(modules: Sequence[UnitPeak], *, overlap: bool) -> int:
    """Bytes of modules at most, of which one is decoded or runs; the largest sum.

    Args:
        modules: all but the root.
        overlap: whether the next module is unsharded while one runs, and gradients of the one before are still being
            reduced.
    """
    places = range(len(modules))
    ahead = [module.ahead if overlap else 0 for module in modules]
    behind = [module.stays + (module.gradients if overlap else 0) for module in modules]
    # One of them may be in use, and one have the other part.
    next_ones = sorted(places, key=ahead.__getitem__, reverse=True)[:3]
    ones_before = sorted(places, key=behind.__getitem__, reverse=True)[:3]

    def sums(place: int) -> Iterator[int]:
        module = modules[place]
        yield module.alone
        for before in ones_before:
            if before != place:
                yield behind[before] + module.alone
        for following in next_ones:
            if following != place:
                running = module.whole + module.gradients + ahead[following]
                yield running
                yield from (
                    running + behind[before]
                    for before in ones_before
                    if before not in (place, following)
                )

    # Modules of one size are one case, and there are mostly few sizes.
    seen = {
        (m.whole, m.ahead, m.wire, m.gradients, m.stays): place for place, m in enumerate(modules)
    }
    return max((nbytes for place in seen.values() for nbytes in sums(place)), default=0)
