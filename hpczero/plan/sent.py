"""Sent: what one rank of a pipeline stage sends in a step, by what it is for, inside its node and between nodes.

With ``Psi`` parameters of the model, ``N`` ranks of a group, ``M`` micro-batches, ``b s h`` elements of a micro-batch's
activations:

    shards     Psi / (t p) x (N - 1) / N each way: stage <= 2 once reduced and once gathered; stage 3 gathered 2 M
               times, once under a pipeline; with a second shard all gathers but the first stay in the node
    replicas   shard x 2 (R - 1) / R: reduced in the dtype of partial sums, gathered in fp32
    tensor     8 b s h (t - 1) / t elements for each block and micro-batch (12 with checkpointing)
    context    8 b s h / (t c) x (c - 1) / c elements for each block and micro-batch (12 with checkpointing)
    pipeline   b s h elements for each boundary, direction and micro-batch; tied weights: one fp32 shard

Source: Rajbhandari et al., ZeRO, SC20, sec. 7; Shoeybi et al., arXiv 1909.08053, sec. 3; Narayanan et al.,
arXiv 2104.04473, sec. 3.2; Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509, sec. 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.job.mesh import SHARD
from hpczero.plan.degrees import GroupSpan
from hpczero.plan.footprint import coded_chunk
from hpczero.plan.plan import FP32_BYTES, Plan
from hpczero.plan.spread import Spread

SUMS = 4  # all-reduces of a block and micro-batch: two in forward, two in backward
EXCHANGES = 8  # tensors of a block and micro-batch that change hands for attention: q, k, v, the output, and back


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sends.

    Attributes:
        inside: to ranks of its node.
        between: to ranks of other nodes.
    """

    inside: int = 0
    between: int = 0

    def __add__(self, other: Wire) -> Wire:
        return Wire(self.inside + other.inside, self.between + other.between)

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.inside + self.between


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a step.

    Attributes:
        shards: parameters and gradients of the ranks that share them.
        replicas: reduced gradients between ranks that hold the same shard.
        tensor: sums of activations.
        context: parts of attention's inputs and outputs.
        pipeline: activations and their gradients from stage to stage.
        ties: gradients of a weight that the first and the last stage hold.
        all_gathers, reduce_scatters: calls over the ranks that share parameters.
    """

    shards: Wire
    replicas: Wire
    tensor: Wire
    context: Wire
    pipeline: Wire
    ties: Wire
    all_gathers: int
    reduce_scatters: int

    @property
    def total(self) -> Wire:
        """All of it."""
        parts = (self.shards, self.replicas, self.tensor, self.context, self.pipeline, self.ties)
        return sum(parts, Wire())


def sent_by(spread: Spread, place: int) -> Sent:
    """What a rank of pipeline stage ``place`` sends in one step, padding included."""
    plan = spread.plan_of(place)
    shards, gathers, reduces = _of_shards(spread, plan, place)
    return Sent(
        shards=shards,
        replicas=_of_replicas(spread, plan, place),
        tensor=_of_tensor(spread, place),
        context=_of_context(spread, place),
        pipeline=_of_pipeline(spread, place),
        ties=_of_ties(spread, plan, place),
        all_gathers=gathers,
        reduce_scatters=reduces,
    )


def blocks_sent(span: GroupSpan, nbytes: int, times: int = 1) -> Wire:
    """One block of ``nbytes`` to every other rank of the group, which a gather or a reduction comes to for each rank.

    Between nodes to the ranks with the same place on other nodes, the rest inside: the paper's (N - 1) / N altogether.
    """
    between = (span.nodes - 1) * nbytes * times
    return Wire((span.size - span.nodes) * nbytes * times, between)


def gathers_of(spread: Spread) -> tuple[int, int]:
    """(all-gathers of a unit over all its ranks, inside the node alone) in one step."""
    stage = spread.plan.stage
    if not stage.shards_parameters or spread.of_transport.lasting:
        return 1, 0  # of updated parameters; at stage 0 of reduced gradients
    if spread.holds_units:
        return 1, 0
    if spread.secondary:  # it serves all gathers of a step but the first
        return 1, 2 * spread.accumulation - 1
    return 2 * spread.accumulation, 0


def _of_shards(spread: Spread, plan: Plan, place: int) -> tuple[Wire, int, int]:
    """Bytes, gathers, reductions. Ranks that share a node's memory send nothing in it."""
    span, item = spread.span(place, *SHARD), spread.itemsize
    everywhere, near = gathers_of(spread)
    gathered = item if plan.stage.shards_optimizer else FP32_BYTES
    # A node's partial sums travel in fp32; where a node has one rank, or by flat, gradients travel as they are.
    partial = spread.transport != "flat" and span.size != span.nodes
    wire = plan.node_itemsize if partial else min(item, plan.node_itemsize)
    shared = spread.of_transport.ranks > 1
    gathers_inside = not (shared and plan.stage.shards_optimizer)
    total = Wire()
    for unit in plan.units:
        shard, whole = unit.layout.shard_numel, unit.layout.padded_numel
        reduced, coding = shard * wire, plan.coding(unit)
        if coding is not None and spread.transport != "flat" and span.nodes > 1:
            rounds = spread.of_transport.round_nbytes
            reduced = coding.nbytes(coded_chunk(coding, span.nodes, rounds))
        away, kept = shard * gathered, plan.coding(unit, gathers=True)
        if kept is not None and spread.transport != "flat" and span.nodes > 1:
            away = kept.nbytes(shard)
        others, peers = span.nodes - 1, span.size - span.nodes
        total += Wire(
            peers * shard * (gathered * everywhere * gathers_inside + item * (not shared)),
            others * (away * everywhere + reduced),
        )
        if not shared:
            total += Wire((span.local - 1) * (whole // span.local) * item * near)
    return total, len(plan.units) * (everywhere + near), len(plan.units)


def _of_replicas(spread: Spread, plan: Plan, place: int) -> Wire:
    """An all-reduce of each shard: a reduction of its parts in the dtype of partial sums, and a gather in fp32."""
    span = spread.span(place, "replicate")
    parts = sum(-(-unit.layout.shard_numel // span.size) for unit in plan.trainable_units)
    return blocks_sent(span, parts * (plan.node_itemsize + FP32_BYTES))


def _of_tensor(spread: Spread, place: int) -> Wire:
    """Sums of activations as a reduction and a gather; with sequence parallelism these are apart, and send as much."""
    span = spread.span(place, "tensor")
    part, wide = spread.part(place), spread.tokens * spread.model.hidden
    sums = (SUMS + 2 * spread.checkpointing) * part.blocks
    sums += part.first + part.last  # the embedding's output, the gradient of the head's input
    block = -(-wide // span.size) * spread.itemsize
    total = blocks_sent(span, block, 2 * sums * spread.accumulation)
    if spread.sequence_parallel and part.first and spread.model.positions == "learned":
        # Each rank adds the positions of its own tokens; backward gathers the gradient of them all.
        positions = spread.model.context // spread.mesh.sequence * spread.model.hidden
        block = -(-positions // span.size) * spread.itemsize
        total += blocks_sent(span, block, spread.accumulation)
    return total


def _of_context(spread: Spread, place: int) -> Wire:
    span = spread.span(place, "sequence")
    exchanged = spread.tokens * spread.model.hidden // spread.mesh.tensor
    times = (EXCHANGES + EXCHANGES // 2 * spread.checkpointing) * spread.part(place).blocks
    return blocks_sent(span, exchanged // span.size * spread.itemsize, times * spread.accumulation)


def _of_pipeline(spread: Spread, place: int) -> Wire:
    """Outputs to the next stage, gradients of inputs to the one before."""
    sends, receives = spread.messages(place)
    nbytes = spread.held(place).output_nbytes * spread.accumulation
    total = Wire()
    for times, other in ((sends, place + 1), (receives, place - 1)):
        total += _to(spread, place, other % spread.mesh.pipeline, times * nbytes)
    return total


def _of_ties(spread: Spread, plan: Plan, place: int) -> Wire:
    part = spread.part(place)
    tied = {each.name for each in part.placements if each.tied}
    units = [unit for unit in plan.units if tied & {slot.name for slot in unit.layout.slots}]
    other = 0 if place else spread.mesh.pipeline - 1
    shard = sum(unit.layout.shard_numel for unit in units)
    return _to(spread, place, other, shard * FP32_BYTES)


def _to(spread: Spread, place: int, other: int, nbytes: int) -> Wire:
    """Bytes from the first rank of one stage to that of another."""
    nodes = {spread.first_rank(one) // spread.ranks_per_node for one in (place, other)}
    return Wire(nbytes, 0) if len(nodes) == 1 else Wire(0, nbytes)
