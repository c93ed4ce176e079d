"""Spread: how a model is spread over ranks, and what each pipeline stage holds. Plain ZeRO is all degrees 1 but shards.

    states of the stage's part, over the ranks of its group of shards     plan.Plan.memory
    + units that stay whole for the step, under a pipeline with sharded parameters
    + a second shard of the parameters inside the node
    + own gradients until the last micro-batch, activations of the forwards alive, buffers between stages

Source: of states: Rajbhandari et al., ZeRO, SC20, sec. 5; second shard: Wang et al., arXiv 2306.10209, sec. 3.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil

from hpczero.job.mesh import DEGREES, SHARD, Mesh
from hpczero.models.config import GPTConfig, parameter_shapes
from hpczero.options.config import Schedule
from hpczero.plan.degrees import GroupSpan, span_of
from hpczero.plan.footprint import Carriers, Footprint, Named, footprint_of
from hpczero.plan.memory import STATE_BYTES
from hpczero.plan.offload import EVERYTHING_KEPT, NOTHING_AWAY, Activations, Offload
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.plan.placement import Placement
from hpczero.plan.plan import Plan, Stage
from hpczero.plan.precision import Gathered, Precision, Reduced
from hpczero.plan.sizing import ForwardSizes, accumulated_nbytes, blockwise_plan


def forwards_alive(
    schedule: Schedule, *, stage: int, pipeline: int, micro_batches: int, interleave: int = 1
) -> Fraction:
    """Forwards of a stage whose backward is still to come, at most.

    ``m`` for gpipe, ``min(p - stage, m)`` for 1f1b. With ``v`` groups of blocks on each stage it is ``min(2 (p - stage
    - 1) + (v - 1) p + 1, m v) / v``, which is ``1 + (p - 1) / (p v)`` times ``p`` on the first stage.

    Source: Narayanan et al., arXiv 2104.04473, sec. 2.2; Korthikanti et al., arXiv 2205.05198, sec. 4.2.3.
    """
    if pipeline == 1:
        return Fraction(1)
    if schedule == "gpipe":
        return Fraction(micro_batches)
    if interleave == 1:
        return Fraction(min(pipeline - stage, micro_batches))
    groups = 2 * (pipeline - stage - 1) + (interleave - 1) * pipeline + 1
    return Fraction(min(groups, micro_batches * interleave), interleave)


def bubble(*, pipeline: int, micro_batches: int, interleave: int = 1) -> Fraction:
    """Idle time over working time of a stage: ``(p - 1) / (v m)``, by gpipe as by 1f1b.

    Source: Narayanan et al., arXiv 2104.04473, sec. 2.2.
    """
    return Fraction(pipeline - 1, micro_batches * interleave)


# Parts: what of a GPT one rank has, where tensor ranks share its layers and pipeline stages its blocks.
#
#     attention.qkv        rows, three strips, heads stay together     the first product of attention; or q, and kv
#     attention.projection columns, heads stay together                the second: partial sums
#     mlp.expansion        rows                                        the first product of the MLP
#     mlp.projection       columns                                     the second: partial sums
#     wte, lm_head         rows of the vocabulary
#     the rest             whole on every tensor rank
#
# Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3; stages: Narayanan et al., arXiv 2104.04473, sec. 2.2.

TIED = "wte.weight"
# Pattern of the name: dimension, strips, and whether heads stay together.
CUTS = (
    (r"attention\.qkv\.(weight|bias)", 0, 3, True),
    (r"attention\.q\.(weight|bias)", 0, 1, True),
    (r"attention\.kv\.(weight|bias)", 0, 2, True),
    (r"attention\.projection\.weight", 1, 1, True),
    (r"mlp\.expansion\.(weight|bias)", 0, 1, False),
    (r"mlp\.projection\.weight", 1, 1, False),
    (r"wte\.weight|lm_head\.weight", 0, 1, False),
)


@dataclass(frozen=True)
class SpreadPart:
    """What one pipeline stage of one tensor rank has.

    Attributes:
        placements: of its parameters, in the order of the whole model; those of the tied weight on the last stage come
            where the head would.
        groups: blocks of each group that the stage runs one after the other; one group without interleaving.
        first: whether it has the embeddings.
        last: whether it has the head.
    """

    placements: tuple[Placement, ...]
    groups: tuple[range, ...]
    first: bool
    last: bool

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(map(len, self.groups))

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and local shape of every parameter, padding included."""
        return tuple((each.name, each.local_shape) for each in self.placements)

    @property
    def numel(self) -> int:
        """Elements that this rank holds when everything is whole, padding included."""
        return sum(each.local_numel for each in self.placements)


def blocks_of(layers: int, parts: int, part: int) -> range:
    """Blocks of one of ``parts`` consecutive groups. Their numbers differ by at most one; the first ones have more."""
    each, more = divmod(layers, parts)
    start = part * each + min(part, more)
    return range(start, start + each + (part < more))


def placement_of(
    name: str, shape: tuple[int, ...], model: GPTConfig, tensor: int, rank: int, *, partial: bool
) -> Placement:
    """Where tensor rank ``rank`` has its part of the parameter ``name`` of a GPT.

    Args:
        name: in the whole model.
        shape: in the whole model.
        model: its sizes.
        tensor: number of ranks that share each layer.
        rank: one of them.
        partial: whether gradients of what is whole are partial sums, as under sequence parallelism.
    """
    if tensor == 1:
        return Placement(name, shape)
    for pattern, dim, strips, heads in CUTS:
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            grain = model.head_size if heads else 1
            return Placement(
                name, shape, dim=dim, strips=strips, grain=grain, part=rank, parts=tensor
            )
    return Placement(name, shape, partial=partial, counted=rank == 0)


@lru_cache(maxsize=512)  # each layout of a search asks for the same stages many times
def part_of_gpt(
    model: GPTConfig,
    *,
    tensor: int = 1,
    rank: int = 0,
    pipeline: int = 1,
    stage: int = 0,
    interleave: int = 1,
    partial: bool = False,
) -> SpreadPart:
    """The part of a GPT that tensor rank ``rank`` of pipeline stage ``stage`` has.

    Args:
        model: sizes of the whole.
        tensor: number of ranks that share each layer.
        rank: one of them; shapes are the same on all.
        pipeline: number of stages.
        stage: one of them, from 0.
        interleave: groups of blocks on each stage.
        partial: whether gradients of what is whole are partial sums.
    """
    groups = tuple(
        blocks_of(model.layers, pipeline * interleave, turn * pipeline + stage)
        for turn in range(interleave)
    )
    first, last = stage == 0, stage == pipeline - 1
    mine = {block for group in groups for block in group}
    found = []
    tied = model.tie_embeddings and pipeline > 1
    for name, shape in parameter_shapes(model):
        block = re.match(r"blocks\.(\d+)\.", name)
        here = (
            int(block[1]) in mine
            if block
            else (first if name.startswith(("wte.", "wpe.")) else last)
        )
        if here:
            found.append((name, shape))
    if tied and last and not first:
        found.append((TIED, (model.vocab_size, model.hidden)))
    placements = []
    for name, shape in found:
        place = placement_of(name, shape, model, tensor, rank, partial=partial)
        if tied and name == TIED:
            place = replace(place, tied=True, counted=first and place.counted)
        placements.append(place)
    return SpreadPart(tuple(placements), groups, first, last)


@dataclass(frozen=True)
class Shares:
    """Bytes of one rank. Those from ``unsharded`` on are peaks within a step.

    Attributes:
        parameters, master, gradients, optimizer: what training keeps.
        secondary: the second shard of the parameters, inside the node.
        held: parameters that are whole for the step, because a pipeline would otherwise gather them for each
            micro-batch.
        unsharded: other whole parameters and gradients in use.
        exchange: buffers through which gradients come.
        accumulated: own whole gradients until the last micro-batch, and one that autograd hands over.
        activations: of all forwards alive.
        boundary: buffers for what comes from and goes to other stages.
    """

    parameters: int
    master: int
    gradients: int
    optimizer: int
    secondary: int
    held: int
    unsharded: int
    exchange: int
    accumulated: int
    activations: int
    boundary: int

    @property
    def states(self) -> int:
        """Bytes held between steps."""
        return self.parameters + self.master + self.gradients + self.optimizer + self.secondary

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class Spread:
    """What is trained, and over which ranks, as a rank of pipeline stage ``place`` sees it.

    Attributes:
        model: sizes of the whole model.
        mesh: degrees.
        ranks_per_node: nodes are filled one after the other.
        stage: ZeRO stage.
        precision: name.
        reduce: form of gradients' partial sums between nodes and replicas.
        gather: form of parameters between nodes.
        micro_batch: samples of one forward on one data-parallel rank.
        accumulation: forwards of a step; under a pipeline its micro-batches.
        leaves: as of ``Footprint``.
        checkpointing: whether only inputs of blocks are kept.
        sequence_parallel: whether norms share the tokens beside tensor parallelism.
        secondary: whether the node has a second shard of the parameters.
        schedule: of the pipeline.
        interleave: groups of blocks on each stage.
        transport: between the ranks that share parameters.
        on_device: whether ranks compute on devices.
        optimizer: name of ``STATE_BYTES``.
        offload: what rests on a memory tier; the host's memory is one with that of the ranks' processes.
        kept: with checkpointing: what is kept of blocks, and where their inputs rest.
        sequence: tokens of a sample; 0: the model's context.
        carriers: where nodes have different numbers of ranks, who moves what between them, as this rank sees it.
        place: pipeline stage.
    """

    model: GPTConfig
    mesh: Mesh
    ranks_per_node: int
    stage: int = 3
    precision: str = "bf16"
    reduce: Reduced = "fp32"
    gather: Gathered = "exact"
    micro_batch: int = 1
    accumulation: int = 1
    leaves: int = 0
    checkpointing: bool = False
    sequence_parallel: bool = False
    secondary: bool = False
    schedule: Schedule = "1f1b"
    interleave: int = 1
    transport: Named = "hierarchical"
    on_device: bool = False
    optimizer: str = "adamw"
    offload: Offload = NOTHING_AWAY
    kept: Activations = EVERYTHING_KEPT
    sequence: int = 0
    carriers: Carriers | None = None
    place: int = 0

    def as_json(self) -> dict[str, object]:
        """For programs: the layout, without the model and what rests elsewhere."""
        beside = ("model", "offload", "kept", "sequence", "carriers", "place")
        names = [each.name for each in fields(Spread) if each.name not in beside]
        values = {name: getattr(self, name) for name in names}
        return {**values, "mesh": dict(zip(DEGREES, self.mesh.degrees, strict=True))}

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.mesh.size

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.sequence or self.model.context

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.accumulation * self.mesh.replicate * self.mesh.shard

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that one rank has."""
        return -(-self.micro_batch * self.length // self.mesh.sequence)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter and of an activation."""
        return Precision.of(self.precision).param_itemsize

    @property
    def holds_units(self) -> bool:
        """Whether parameters that are sharded are gathered once for all micro-batches of a step."""
        return self.mesh.pipeline > 1 and Stage.of(self.stage).shards_parameters

    @property
    def bubble(self) -> Fraction:
        """Idle over working time of a pipeline stage."""
        return bubble(
            pipeline=self.mesh.pipeline, micro_batches=self.accumulation, interleave=self.interleave
        )

    def first_rank(self, place: int) -> int:
        """The first rank of a pipeline stage."""
        return place * (self.mesh.size // self.mesh.pipeline)

    def span(self, place: int, *names: str) -> GroupSpan:
        """A group of the first rank of a stage on its nodes."""
        return span_of(self.mesh, self.ranks_per_node, *names, first=self.first_rank(place))

    @cached_property
    def shards(self) -> GroupSpan:
        """The group that shares parameters; of the stages, that on most nodes."""
        return max((self.span(place, *SHARD) for place in self.kinds), key=lambda span: span.nodes)

    @cached_property
    def of_transport(self) -> Footprint:
        """Footprint of the transport between the ranks that share parameters."""
        replicas = self.span(0, "replicate")
        return replace(
            footprint_of(
                self.transport,
                ranks=self.shards.size,
                local_size=self.shards.local,
                carriers=self.carriers,
                on_device=self.on_device,
            ),
            replicas=replicas.size,
            replica_nodes=replicas.nodes,
            leaves=self.leaves,
        )

    @property
    def footprint(self) -> Footprint:
        """The same with these parameters, which may leave memory between uses."""
        return self.offloaded.footprint(self.of_transport)

    def part(self, place: int) -> SpreadPart:
        """What of the model a rank of stage ``place`` has."""
        return part_of_gpt(
            self.model,
            tensor=self.mesh.tensor,
            pipeline=self.mesh.pipeline,
            stage=place,
            interleave=self.interleave,
            partial=self.sequence_parallel,
        )

    def plan_of(self, place: int) -> Plan:
        """The plan that ``zeroify`` makes of the part of stage ``place``."""
        return _plan(
            self.model,
            self.mesh,
            place,
            self.interleave,
            self.sequence_parallel,
            self.stage,
            Precision.of(self.precision, reduce=self.reduce, gather=self.gather),
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan of this rank."""
        return self.plan_of(self.place)

    @property
    def offloaded(self) -> OffloadedPlan:
        """The plan of this rank with what rests elsewhere."""
        return OffloadedPlan(self.plan, self.offload)

    @property
    def input_nbytes(self) -> int:
        """Bytes of the input of a block."""
        return self.length * self.micro_batch * self.model.hidden * self.itemsize

    @property
    def inputs_away(self) -> int:
        """Bytes of inputs of blocks that rest elsewhere at the end of a forward: all but the newest."""
        if not self.checkpointing or not self.kept.away:
            return 0
        layers = self.model.layers
        return (layers - self.kept.kept(layers)) * self.input_nbytes

    def held(self, place: int) -> ForwardSizes:
        """Sizes of the forwards of a stage."""
        part = self.part(place)
        return ForwardSizes(
            self.model,
            self.tokens,
            self.itemsize,
            part.blocks,
            tensor=self.mesh.tensor,
            sequence_parallel=self.sequence_parallel,
            checkpointing=self.checkpointing,
            last=part.last,
            on_device=self.on_device,
            kept=self.kept,
        )

    def alive(self, place: int) -> Fraction:
        """Forwards of a stage whose backward is still to come, at most."""
        return forwards_alive(
            self.schedule,
            stage=place,
            pipeline=self.mesh.pipeline,
            micro_batches=self.accumulation,
            interleave=self.interleave,
        )

    def shares(self, place: int) -> Shares:
        """Bytes of one rank of stage ``place``. All ranks of a stage hold as much, padding included."""
        plan, footprint = self.plan_of(place), self.of_transport
        memory = plan.memory(optimizer_bytes=STATE_BYTES[self.optimizer], footprint=footprint)
        alike = ("parameters", "master", "gradients", "optimizer", "exchange")
        return Shares(
            **{name: getattr(memory, name) for name in alike},
            secondary=self.secondary_nbytes(place),
            held=self.held_nbytes(place),
            unsharded=max(self.unsharded_nbytes(place), memory.stepping),
            accumulated=accumulated_nbytes(plan, self.accumulation, footprint=footprint)
            + self.arriving_nbytes(place),
            activations=self.held(place).peak_nbytes(self.alive(place)),
            boundary=self.boundary_nbytes(place),
        )

    def _whole_nbytes(self, place: int) -> int:
        return self.itemsize * sum(u.layout.padded_numel for u in self.plan_of(place).units)

    def secondary_nbytes(self, place: int) -> int:
        """Bytes of the second shard of the parameters inside the node."""
        if not self.secondary:
            return 0
        if self.gather == "exact":
            return -(-self._whole_nbytes(place) // self.shards.local)
        plan, total = self.plan_of(place), 0
        for unit in plan.units:
            coding, shard = plan.coding(unit, gathers=True), unit.layout.shard_numel
            total += shard * self.itemsize if coding is None else coding.nbytes(shard)
        return total * self.span(place, *SHARD).nodes

    def held_nbytes(self, place: int) -> int:
        """Bytes of parameters that are whole for the step."""
        if not self.holds_units or self.of_transport.lasting:
            return 0
        return self._whole_nbytes(place) // self.of_transport.copies

    def unsharded_nbytes(self, place: int) -> int:
        """Bytes of other whole parameters and gradients in use."""
        plan, footprint = self.plan_of(place), self.of_transport
        if self.holds_units and not footprint.lasting:
            plan = replace(plan, stage=Stage.of(2))
        return plan.memory(footprint=footprint).unsharded

    def boundary_nbytes(self, place: int) -> int:
        """Bytes of buffers between stages: what comes and what goes on each side, and what has gone.

        What has gone stays in autograd's graph until its backward.
        """
        sends, receives = self.messages(place)
        sides = min(sends + receives, 2)
        return ceil((2 * sides + self.alive(place) * sends) * self.held(place).output_nbytes)

    def messages(self, place: int) -> tuple[int, int]:
        """(outputs that leave a stage, inputs that come to it) in one forward; backward sends the other way."""
        if self.mesh.pipeline == 1:
            return 0, 0
        part = self.part(place)
        return self.interleave - part.last, self.interleave - part.first

    def arriving_nbytes(self, place: int) -> int:
        """Bytes of gradients that autograd holds at most before it hands them over: those of the largest parameter.

        A tied embedding gets two, from the head and from the lookup. The first waits through all of backward for the
        other, and their sum is a third.
        """
        sizes = {each.name: each.local_numel for each in self.part(place).placements}
        both = self.model.tie_embeddings and self.mesh.pipeline == 1
        return self.itemsize * max(max(sizes.values()), 3 * sizes[TIED] if both else 0)

    @cached_property
    def kinds(self) -> dict[int, int]:
        """The first pipeline stage of each kind, with how many are alike; later ones of a kind hold no more."""
        found: dict[tuple[object, ...], list[int]] = {}
        for place in range(self.mesh.pipeline):
            part = self.part(place)
            kind = (part.blocks, part.first, part.last, self.span(place, *SHARD))
            found.setdefault(kind, []).append(place)
        return {places[0]: len(places) for places in found.values()}

    @cached_property
    def worst(self) -> int:
        """The stage whose ranks hold most."""
        return max(self.kinds, key=lambda place: self.shares(place).total)

    @property
    def needed_nbytes(self) -> int:
        """Bytes of a rank of the stage that holds most."""
        return self.shares(self.worst).total


@lru_cache(maxsize=64)  # of many layouts that differ in their batch alone
def _plan(
    model: GPTConfig,
    mesh: Mesh,
    place: int,
    interleave: int,
    partial: bool,
    stage: int,
    precision: Precision,
) -> Plan:
    part = part_of_gpt(
        model,
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        stage=place,
        interleave=interleave,
        partial=partial,
    )
    apart = [each.name for each in part.placements if each.tied and each.name == TIED]
    return blockwise_plan(
        part.shapes,
        num_shards=mesh.shard * mesh.sequence,
        stage=stage,
        precision=precision,
        apart=apart,
    )
