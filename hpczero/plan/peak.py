"""The peak of a run: what one rank holds at each moment, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hpczero.job.mesh import Mesh
from hpczero.models.config import parameter_count
from hpczero.options.config import LayoutOptions
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offload import EVERYTHING_KEPT, Medium
from hpczero.plan.offloaded import ADAM_STATES
from hpczero.plan.plan import FP32_BYTES
from hpczero.plan.sizing import accumulated_nbytes
from hpczero.plan.spread import Spread

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


@dataclass(frozen=True)
class PlannedRun(Spread):
    """A run, as one of its ranks sees it.

    A low estimate must be one, or what fits would be refused. Of a layout, activations and own gradients of the step
    count in it as the larger of the two, because under a pipeline they need not peak at once.

    Attributes:
        copies: whether a checkpoint is written from a copy of the shards, in the background.
        laid_out: whether the number of nodes was given, not found.
        layout: the degrees as options, for a command line; None where all ranks share one set of shards.
        near: pipeline stage of each rank of the node.
    """

    copies: bool = False
    laid_out: bool = False
    layout: LayoutOptions | None = None
    near: tuple[int, ...] = (0,)

    def on(self, ranks: int, ranks_per_node: int) -> PlannedRun:
        """The same on other ranks, all of which share one set of shards."""
        return replace(self, mesh=Mesh(shard=ranks), ranks_per_node=ranks_per_node, carriers=None)

    @property
    def whole_numel(self) -> int:
        """Parameters of the whole model."""
        return parameter_count(self.model)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Bytes of states and buffers of a rank; what a pipeline keeps whole for a step is among ``unsharded``."""
        alike = replace(
            self, micro_batch=1, accumulation=1, checkpointing=False, kept=EVERYTHING_KEPT
        )
        return _memory(alike)

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
        """Bytes of activations of all forwards alive, and of what is on its way between stages or to a tier."""
        staged = self.checkpointing and not self.layout
        staging = self.kept.staging_nbytes(self.input_nbytes) if staged else 0
        held = self.held(self.place)
        held = replace(held, kept=EVERYTHING_KEPT) if self.layout else held
        peak = held.peak_nbytes(self.alive(self.place))
        return peak + self.boundary_nbytes(self.place) + staging

    @cached_property
    def accumulated(self) -> int:
        """Bytes of this rank's own whole gradients until the last forward of a step; of a layout one that arrives too.

        Those that are collected in the memory of the mean are not among them.
        """
        found = accumulated_nbytes(
            self.plan,
            self.accumulation,
            footprint=self.of_transport,
            apart=self.offloaded.gradients,
        )
        return found + self.arriving_nbytes(self.place) if self.layout else found

    @property
    def _lasting(self) -> int:
        held = self.memory
        return held.parameters + held.master + held.optimizer + held.staging + self.tiered

    @property
    def _in_place(self) -> bool:
        """Whether own gradients are collected in the memory of the mean."""
        alone = self.of_transport.sums_in_place(self.plan.num_shards, self.itemsize)
        return alone and not self.offloaded.gradients

    @property
    def _kept_gradients(self) -> int:
        if not self.plan.stage.keeps_local_gradients or self._in_place:
            return 0
        return self.itemsize * sum(u.layout.padded_numel for u in self.plan.trainable_units)

    @property
    def moments(self) -> Moments:
        """Low estimates of what a rank holds."""
        largest = max((unit.layout.numel for unit in self.plan.units), default=0)
        in_place = self.memory.gradients if self._in_place and self.accumulation > 1 else 0
        waiting = self.accumulated + in_place
        activations = self.activations - self.boundary_nbytes(self.place)
        lasting = self._lasting + self._kept_gradients
        return Moments(
            loss=lasting + (max(activations, waiting) if self.layout else activations + waiting),
            step=self._lasting + self.memory.gradients,
            end=lasting + FP32_BYTES * largest,
        )

    @property
    def most(self) -> int:
        """High estimate: everything that a step ever holds, as if at the same time."""
        arriving = 0 if self.layout else self.arriving_nbytes(self.place)
        held = self.memory.total + self.accumulated + self.activations + arriving
        return held + self._copied + self.tiered

    @property
    def _copied(self) -> int:
        """Bytes that a save or a load takes beside the state: all of it in the background, else one tensor at a time.

        What rests on a tier passes in pieces.
        """
        if not self.copies:
            if self.offload.any:
                return PIECES_NBYTES
            return FP32_BYTES * sum(u.layout.padded_numel for u in self.plan.units) // self.ranks
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
            wholes = self._whole_nbytes(self.place) // footprint.ranks
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
        return self.itemsize * max(sizes, default=0)


@lru_cache(maxsize=4096)  # of many runs that differ in their batch alone
def _memory(run: PlannedRun) -> MemoryPlan:
    found = run.offloaded.memory(run.of_transport)
    place, unsharded = run.place, found.unsharded
    if run.holds_units:
        unsharded = run.unsharded_nbytes(place)
    more = run.held_nbytes(place) + run.secondary_nbytes(place)
    return replace(found, unsharded=unsharded + more)
