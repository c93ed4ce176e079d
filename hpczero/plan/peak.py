"""The peak of a run: what one rank holds at each moment, before anything is allocated.

Owns: the moments at which a run holds most, and what of that ranks share. Must not know: torch, MPI, what a machine
has, what Python and the libraries take themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod

from typing_extensions import override

from hpczero.options.config import LayoutOptions
from hpczero.plan.footprint import Carriers, Footprint, Named, footprint_of
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offload import EVERYTHING_KEPT, NOTHING_AWAY, Activations, Medium, Offload
from hpczero.plan.offloaded import ADAM_STATES, OffloadedPlan
from hpczero.plan.plan import FP32_BYTES, Plan
from hpczero.plan.precision import DType, Precision
from hpczero.plan.sizing import (
    Transformer,
    accumulated_nbytes,
    activation_nbytes,
    arriving_nbytes,
    blockwise_plan,
)
from hpczero.plan.spread import Shares, Spread

# Rounds of a save or a load and windows that are partly read or written: checkpoint.exchange and checkpoint.held.
PIECES_NBYTES = 128 * 2**20


@dataclass(frozen=True)
class Moments:
    """Bytes of one rank at the moments that can be the peak. Each is a low estimate, without what lasts briefly.

    Attributes:
        loss: forward has ended: all activations, no reduced gradients.
        step: backward has ended: all reduced gradients, no activations.
        end: training has ended: the final weights are collected unit by unit.
    """

    loss: int
    step: int
    end: int


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """A model as far as bytes go. It remembers its last plans, because many runs are tried with one model.

    Attributes:
        model: sizes for the activations.
        shapes: qualified name and shape of every parameter, a tied weight once.
    """

    model: Transformer
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def plan(self, ranks: int, stage: int, precision: Precision) -> Plan:
        """The plan that ``zeroify`` will make."""
        return _plan(self, ranks, stage, precision)


@lru_cache(maxsize=8)  # the stages, on these ranks and on more
def _plan(network: ModelSizes, ranks: int, stage: int, precision: Precision) -> Plan:
    return blockwise_plan(network.shapes, num_shards=ranks, stage=stage, precision=precision)


@lru_cache(maxsize=4096)  # of many runs that differ in their batch alone
def _memory(
    network: ModelSizes,
    ranks: int,
    local_size: int,
    transport: Named,
    stage: int,
    precision: Precision,
    offload: Offload,
    carriers: Carriers | None,
    on_device: bool,
) -> MemoryPlan:
    plan = OffloadedPlan(network.plan(ranks, stage, precision), offload)
    footprint = footprint_of(
        transport, ranks=ranks, local_size=local_size, carriers=carriers, on_device=on_device
    )
    return plan.memory(footprint)


@dataclass(frozen=True)
class PlannedRun:
    """What is to be trained, as far as bytes go.

    Attributes:
        network: the model.
        ranks: the world size.
        local_size: number of ranks on a node.
        transport: flat, hierarchical, window or ipc.
        stage: 0 to 3.
        precision: name of the precision.
        sequence: tokens per sample.
        micro_batch: samples per rank and forward.
        accumulation: forwards per step.
        checkpointing: whether activations are checkpointed.
        copies: whether a checkpoint is written from a copy of the shards, in the background.
        laid_out: whether the number of nodes was given, not found.
        offload: what rests on a memory tier. The host's memory is one with that of the ranks' processes.
        kept: with checkpointing: what is kept of blocks, and where their inputs rest.
        reduce: dtype of gradients' partial sums between nodes.
        carriers: where nodes have different numbers of ranks, who moves what between them, as this rank sees it.
        on_device: whether ranks compute on devices.
    """

    network: ModelSizes
    ranks: int
    local_size: int
    transport: Named
    stage: int
    precision: str
    sequence: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    copies: bool = False
    laid_out: bool = False
    offload: Offload = NOTHING_AWAY
    kept: Activations = EVERYTHING_KEPT
    reduce: DType = "fp32"
    carriers: Carriers | None = None
    on_device: bool = False

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @cached_property
    def plan(self) -> Plan:
        """The plan that ``zeroify`` will make."""
        return self.network.plan(self.ranks, self.stage, self._dtypes)

    @property
    def _dtypes(self) -> Precision:
        return Precision.of(self.precision, reduce=self.reduce)

    @property
    def offloaded(self) -> OffloadedPlan:
        """The plan with what rests elsewhere."""
        return OffloadedPlan(self.plan, self.offload)

    @property
    def footprint(self) -> Footprint:
        """Footprint of the transport, with these parameters."""
        return self.offloaded.footprint(self._of_transport)

    @property
    def _of_transport(self) -> Footprint:
        return footprint_of(
            self.transport,
            ranks=self.ranks,
            local_size=self.local_size,
            carriers=self.carriers,
            on_device=self.on_device,
        )

    @cached_property
    def memory(self) -> MemoryPlan:
        """Bytes of states and buffers of a rank."""
        return _memory(
            self.network,
            self.ranks,
            self.local_size,
            self.transport,
            self.stage,
            self._dtypes,
            self.offload,
            self.carriers,
            self.on_device,
        )

    @property
    def inputs_away(self) -> int:
        """Bytes of inputs of blocks that rest elsewhere at the end of a forward."""
        if not self.checkpointing or not self.kept.away:
            return 0
        layers = self.network.model.layers
        return (layers - self.kept.kept(layers)) * self.input_nbytes

    def resting(self, medium: Medium) -> int:
        """Bytes of a rank that rest on ``medium``: host or disk."""
        shards = self.memory.away if self.offload.medium == medium else 0
        return shards + (self.inputs_away if self.kept.rest == medium else 0)

    @property
    def tiered(self) -> int:
        """Bytes of memory tiers that are memory of the host; beside a device they are not in its memory."""
        return self.resting("host")

    @cached_property
    def activations(self) -> int:
        """Bytes of activations at the peak of one forward and backward."""
        return activation_nbytes(
            self.network.model,
            sequence=self.sequence,
            batch=self.micro_batch,
            itemsize=self.plan.precision.param_itemsize,
            checkpointing=self.checkpointing,
            kept=self.kept,
            on_device=self.on_device,
        ) + (self.kept.staging_nbytes(self.input_nbytes) if self.checkpointing else 0)

    @property
    def input_nbytes(self) -> int:
        """Bytes of the input of a block."""
        item = self.plan.precision.param_itemsize
        return self.sequence * self.micro_batch * self.network.model.hidden * item

    @cached_property
    def accumulated(self) -> int:
        """Bytes of this rank's own whole gradients, which are kept until the last forward of a step."""
        apart = self.offloaded.gradients
        return accumulated_nbytes(self.plan, self.accumulation, apart=apart)

    @property
    def _arriving(self) -> int:
        """Bytes of gradients on their way from autograd into the unit's buffer."""
        shapes, item = self.network.shapes, self.plan.precision.param_itemsize
        return arriving_nbytes(self.network.model, shapes, itemsize=item)

    @property
    def _lasting(self) -> int:
        held = self.memory
        return held.parameters + held.master + held.optimizer + held.staging + self.tiered

    @property
    def _in_place(self) -> bool:
        """Whether own gradients are collected in the memory of the mean."""
        item = self.plan.precision.param_itemsize
        alone = self._of_transport.sums_in_place(self.plan.num_shards, item)
        return alone and not self.offloaded.gradients

    @property
    def _collected(self) -> int:
        """Bytes of them before the last forward of a step ends; ``accumulated`` are those in memory of their own."""
        return self.memory.gradients if self._in_place and self.accumulation > 1 else 0

    @property
    def _kept_gradients(self) -> int:
        if not self.plan.stage.keeps_local_gradients or self._in_place:
            return 0
        trainable = sum(unit.layout.padded_numel for unit in self.plan.trainable_units)
        return self.plan.precision.param_itemsize * trainable

    @property
    def moments(self) -> Moments:
        """Low estimates of what a rank holds."""
        largest = max((unit.layout.numel for unit in self.plan.units), default=0)
        return Moments(
            loss=self._lasting
            + self._kept_gradients
            + self._collected
            + self.accumulated
            + self.activations,
            step=self._lasting + self.memory.gradients,
            end=self._lasting + self._kept_gradients + FP32_BYTES * largest,
        )

    @property
    def most(self) -> int:
        """High estimate: everything that a step ever holds, as if at the same time."""
        held = self.memory.total + self.accumulated + self.activations + self._arriving
        return held + self._copied + self.tiered

    @property
    def _copied(self) -> int:
        """Bytes that a save or a load takes beside the state: all of it in the background, else one tensor at a time.

        What rests on a tier passes in pieces.
        """
        if not self.copies:
            if self.offload.any:
                return PIECES_NBYTES
            return (
                FP32_BYTES * sum(unit.layout.padded_numel for unit in self.plan.units) // self.ranks
            )
        if self.offload.any:
            shards = sum(unit.layout.shard_numel for unit in self.plan.trainable_units)
            return FP32_BYTES * (1 + ADAM_STATES) * shards
        own_masters = 0 if self.plan.precision.has_masters else self.memory.optimizer // 2
        return self.memory.master + self.memory.optimizer + own_masters

    @property
    def most_at_end(self) -> int:
        """High estimate of the end."""
        return self.moments.end + self.memory.unsharded + self.memory.exchange

    @property
    def shared(self) -> int:
        """Bytes of a rank that are its part of memory shared by its node; high estimate."""
        footprint = self.footprint
        if self.transport != "window" or not footprint.reads_peers:
            return 0
        wholes = 0
        if self.plan.stage.shards_optimizer:
            item = self.plan.precision.param_itemsize
            wholes = item * sum(u.layout.padded_numel for u in self.plan.units) // footprint.ranks
        return wholes + self.memory.exchange + self._spare + self._kept_gradients

    @property
    def least_shared(self) -> int:
        """The same as a low estimate: whole parameters, if a node keeps one copy of them."""
        stage, footprint = self.plan.stage, self.footprint
        kept = stage.shards_optimizer and (footprint.lasting or not stage.shards_parameters)
        return self.memory.parameters if self.shared and kept and footprint.copies > 1 else 0

    @property
    def mapped(self) -> int:
        """Bytes of address space that one process maps, shared memory of its node included; high estimate."""
        return self.most - self.shared + self.shared * self.footprint.ranks

    @property
    def least_mapped(self) -> int:
        """Bytes of address space that one process maps; low estimate."""
        private = max(self.moments.loss, self.moments.step) - self.shared
        return max(private, 0) + self.shared * self.footprint.ranks

    @property
    def _spare(self) -> int:
        """Bytes of the place for gradients that find theirs taken. It is mapped, and seldom used."""
        if self.plan.stage.keeps_local_gradients:
            return 0
        sizes = [unit.layout.padded_numel for unit in self.plan.trainable_units]
        return self.plan.precision.param_itemsize * max(sizes, default=0)


# The peak of a run whose ranks share layers, blocks, tokens or replicas: what one rank of a pipeline stage holds.
#
# A low estimate must be one, or what fits would be refused. Of a pipeline, activations and own gradients of the step
# count in it as the larger of the two, because they need not peak at once.


@dataclass(frozen=True)
class PartRun(PlannedRun):
    """A run as one rank of stage ``place`` sees it; ``ranks`` and ``network`` are those of the whole job.

    Attributes:
        layout: the degrees as options, for a command line.
        spread: over which ranks; its stage, batch, checkpointing, transport and device are the run's.
        place: pipeline stage.
        near: pipeline stage of each rank of the node.
    """

    layout: LayoutOptions = field(kw_only=True)
    spread: Spread = field(kw_only=True)
    place: int = 0
    near: tuple[int, ...] = (0,)

    @cached_property
    def counted(self) -> Spread:
        """The spread as this run has it."""
        return replace(
            self.spread,
            stage=self.stage,
            precision=self.precision,
            reduce=self.reduce,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            checkpointing=self.checkpointing,
            transport=self.transport,
            on_device=self.on_device,
        )

    @property
    def bubble(self) -> Fraction:
        """Idle over working time of a stage."""
        return self.counted.bubble

    @property
    def whole_numel(self) -> int:
        """Parameters of the whole model."""
        return sum(prod(shape) for _, shape in self.network.shapes)

    @cached_property
    def _shares(self) -> Shares:
        return self.counted.shares(self.place)

    @property
    @override
    def global_batch(self) -> int:
        """Samples of a step over all data parallel ranks."""
        return self.counted.global_batch

    @cached_property
    @override
    def plan(self) -> Plan:
        """The plan that ``zeroify`` will make of the stage's part."""
        return self.counted.plan(self.place)

    @property
    @override
    def _of_transport(self) -> Footprint:
        found = self.counted.footprint
        if self.carriers is None:
            return found
        of_ranks = super()._of_transport
        return replace(of_ranks, replicas=found.replicas, replica_nodes=found.replica_nodes)

    @cached_property
    @override
    def memory(self) -> MemoryPlan:
        """Bytes of states and buffers of a rank; what a pipeline keeps whole for a step is among ``unsharded``."""
        found, shares = (
            OffloadedPlan(self.plan, self.offload).memory(self._of_transport),
            self._shares,
        )
        unsharded = shares.unsharded if self.counted.holds_units else found.unsharded
        return replace(found, unsharded=unsharded + shares.held + shares.secondary)

    @cached_property
    @override
    def activations(self) -> int:
        """Bytes of activations of all forwards alive, and of what is on its way between stages."""
        return self._shares.activations + self._shares.boundary

    @cached_property
    @override
    def accumulated(self) -> int:
        """Bytes of this rank's own whole gradients until the last micro batch, one that arrives included."""
        return self._shares.accumulated

    @property
    @override
    def _arriving(self) -> int:
        return 0  # counted with those that are kept

    @property
    @override
    def moments(self) -> Moments:
        """Low estimates of what a rank holds."""
        largest = max((unit.layout.numel for unit in self.plan.units), default=0)
        lasting = self._lasting + self._kept_gradients
        return Moments(
            loss=lasting + max(self._shares.activations, self.accumulated + self._collected),
            step=self._lasting + self.memory.gradients,
            end=lasting + FP32_BYTES * largest,
        )
