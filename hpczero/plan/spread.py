"""Spread: a model over the ranks of a mesh, and what each pipeline stage holds.

Owns: bytes of memory of one rank of each stage. Must not know: torch, MPI, time; what is sent is ``plan.sent``.

    states of the stage's part, over the ranks of its group of shards     plan.Plan.memory
    + units that stay whole for the step, under a pipeline with sharded parameters
    + a second shard of the parameters inside the node
    + own gradients until the last micro-batch, activations of the forwards alive, buffers between stages

Source: issue 19; states: Rajbhandari et al., ZeRO, SC20, sec. 5; second shard: Wang et al., arXiv 2306.10209, sec. 3.2.
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
from hpczero.plan.degrees import Span, span_of
from hpczero.plan.footprint import Footprint, Named, footprint_of
from hpczero.plan.held import Held, bubble, forwards_alive
from hpczero.plan.memory import STATE_BYTES
from hpczero.plan.placement import Placement
from hpczero.plan.plan import Plan, Stage
from hpczero.plan.precision import DType, Precision
from hpczero.plan.sizing import accumulated_nbytes, blockwise_plan

# Parts: what of a GPT one rank has, where tensor ranks share its layers and pipeline stages its blocks.
#
#     attention.qkv        rows, three strips, heads stay together     the first product of attention
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
    (r"attention\.projection\.weight", 1, 1, True),
    (r"mlp\.expansion\.(weight|bias)", 0, 1, False),
    (r"mlp\.projection\.weight", 1, 1, False),
    (r"wte\.weight|lm_head\.weight", 0, 1, False),
)


@dataclass(frozen=True)
class Part:
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
) -> Part:
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
            place = _tied(place, counted=first and place.counted)
        placements.append(place)
    return Part(tuple(placements), groups, first, last)


def _tied(place: Placement, *, counted: bool) -> Placement:
    return Placement(**{**vars(place), "tied": True, "counted": counted})


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
    """What is trained, and over which ranks.

    Attributes:
        model: sizes of the whole model; its context is the length of a sample.
        mesh: degrees.
        ranks_per_node: nodes are filled one after the other.
        stage: ZeRO stage.
        precision: name.
        reduce: dtype of gradients' partial sums between nodes and replicas.
        micro_batch: samples of one forward on one data-parallel rank.
        accumulation: forwards of a step; under a pipeline its micro-batches.
        checkpointing: whether only inputs of blocks are kept.
        sequence_parallel: whether norms share the tokens beside tensor parallelism.
        secondary: whether the node has a second shard of the parameters.
        schedule: of the pipeline.
        interleave: groups of blocks on each stage.
        transport: between the ranks that share parameters.
        on_device: whether ranks compute on devices.
        optimizer: name of ``STATE_BYTES``.
    """

    model: GPTConfig
    mesh: Mesh
    ranks_per_node: int
    stage: int = 3
    precision: str = "bf16"
    reduce: DType = "fp32"
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool = False
    sequence_parallel: bool = False
    secondary: bool = False
    schedule: Schedule = "1f1b"
    interleave: int = 1
    transport: Named = "hierarchical"
    on_device: bool = False
    optimizer: str = "adamw"

    def as_json(self) -> dict[str, object]:
        """For programs: everything but the model."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["model"]
        return {**values, "mesh": dict(zip(DEGREES, self.mesh.degrees, strict=True))}

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.accumulation * self.mesh.replicate * self.mesh.shard

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that one rank has."""
        return -(-self.micro_batch * self.model.context // self.mesh.sequence)

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
            pipeline=self.mesh.pipeline,
            micro_batches=self.accumulation,
            interleave=self.interleave,
        )

    def first_rank(self, place: int) -> int:
        """The first rank of a pipeline stage."""
        return place * (self.mesh.size // self.mesh.pipeline)

    def span(self, place: int, *names: str) -> Span:
        """A group of the first rank of a stage on its nodes."""
        return span_of(self.mesh, self.ranks_per_node, *names, first=self.first_rank(place))

    @cached_property
    def shards(self) -> Span:
        """The group that shares parameters; of the stages, that on most nodes."""
        return max(
            (self.span(place, *SHARD) for place in self.kinds),
            key=lambda span: span.nodes,
        )

    @property
    def footprint(self) -> Footprint:
        """Footprint of the transport between the ranks that share parameters."""
        replicas = self.span(0, "replicate")
        return replace(
            footprint_of(
                self.transport,
                ranks=self.shards.size,
                local_size=self.shards.local,
                on_device=self.on_device,
            ),
            replicas=replicas.size,
            replica_nodes=replicas.nodes,
        )

    def part(self, place: int) -> Part:
        """What of the model a rank of stage ``place`` has."""
        return part_of_gpt(
            self.model,
            tensor=self.mesh.tensor,
            pipeline=self.mesh.pipeline,
            stage=place,
            interleave=self.interleave,
            partial=self.sequence_parallel,
        )

    def plan(self, place: int) -> Plan:
        """The plan that ``zeroify`` makes of that part."""
        precision = Precision.of(self.precision, reduce=self.reduce)
        return _plan(self.part(place), self.mesh.shard * self.mesh.sequence, self.stage, precision)

    def held(self, place: int) -> Held:
        """Sizes of the forwards of a stage."""
        part = self.part(place)
        return Held(
            self.model,
            self.tokens,
            self.itemsize,
            part.blocks,
            tensor=self.mesh.tensor,
            sequence_parallel=self.sequence_parallel,
            checkpointing=self.checkpointing,
            last=part.last,
            on_device=self.on_device,
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
        plan, held, footprint = self.plan(place), self.held(place), self.footprint
        memory = plan.memory(optimizer_bytes=STATE_BYTES[self.optimizer], footprint=footprint)
        whole = self.itemsize * sum(unit.layout.padded_numel for unit in plan.units)
        unsharded, kept = memory.unsharded, 0
        if self.holds_units and not footprint.lasting:
            kept = whole // footprint.copies
            unsharded = replace(plan, stage=Stage.of(2)).memory(footprint=footprint).unsharded
        alive, part = self.alive(place), self.part(place)
        sends, receives = self.messages(place)
        # What comes and what goes on each side; what has gone stays in autograd's graph until its backward.
        sides = min(sends + receives, 2)
        boundary = ceil((2 * sides + alive * sends) * held.output_nbytes)
        return Shares(
            parameters=memory.parameters,
            master=memory.master,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            secondary=-(-whole // self.shards.local) if self.secondary else 0,
            held=kept,
            unsharded=max(unsharded, memory.stepping),
            exchange=memory.exchange,
            accumulated=accumulated_nbytes(plan, self.accumulation, footprint=footprint)
            + self._arriving_nbytes(part),
            activations=held.peak_nbytes(alive),
            boundary=boundary,
        )

    def messages(self, place: int) -> tuple[int, int]:
        """(outputs that leave a stage, inputs that come to it) in one forward; backward sends the other way."""
        if self.mesh.pipeline == 1:
            return 0, 0
        part = self.part(place)
        return self.interleave - part.last, self.interleave - part.first

    def _arriving_nbytes(self, part: Part) -> int:
        """Bytes of gradients that autograd holds before it hands them over, as ``sizing.arriving_nbytes`` says."""
        sizes = {each.name: each.local_numel for each in part.placements}
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


@lru_cache(maxsize=512)
def _plan(part: Part, num_shards: int, stage: int, precision: Precision) -> Plan:
    apart = [each.name for each in part.placements if each.tied and each.name == TIED]
    return blockwise_plan(
        part.shapes, num_shards=num_shards, stage=stage, precision=precision, apart=apart
    )
