"""The peak of a run whose ranks share layers, blocks, tokens or replicas: what one rank of a pipeline stage holds.

Owns: which figures of a ``Spread`` stand for which of a ``Run``. Must not know: torch, MPI, what a machine has.

A low estimate must be one, or what fits would be refused. Of a pipeline, activations and own gradients of the step
count in it as the larger of the two, because they need not peak at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import prod

from typing_extensions import override

from hpczero.options.config import LayoutOptions
from hpczero.plan.footprint import Footprint
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.plan.peak import Moments, Run
from hpczero.plan.plan import FP32_BYTES, Plan
from hpczero.plan.spread import Shares, Spread


@dataclass(frozen=True)
class PartRun(Run):
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
