"""OffloadedPlan: bytes of one rank where parts of its shards rest on a memory tier.

Owns: what is held in memory besides, what rests on the medium, and what moves in a step. Must not know: torch, tiers,
how anything is moved.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 3 and 5; the table is in docs/tiers.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpczero.plan.footprint import Footprint
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offload import Offload
from hpczero.plan.plan import FP32_BYTES, Plan, UnitSpec
from hpczero.plan.windows import windows_of

ADAM_STATES = 2
PAGE = 4096  # bytes; the end of a part is filled up to one
MOST_PARTS = 16  # of a record: a block of staging has so many ends of pages to spare
LANDING = (
    2  # gradients that are in memory at a time: one is being made, one is being reduced or written
)


@dataclass(frozen=True)
class TierTraffic:
    """Bytes of parts that one rank moves in a step, padding of units included, pages not."""

    read_nbytes: int = 0
    written_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Both ways."""
        return self.read_nbytes + self.written_nbytes


@dataclass(frozen=True)
class OffloadedPlan:
    """A plan with parts of it elsewhere.

    Attributes:
        plan: of the model.
        offload: what rests where; it fits the plan's stage.
        states: elementwise states of the optimizer, fp32: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
    """

    plan: Plan
    offload: Offload
    states: int = ADAM_STATES

    @property
    def values(self) -> bool:
        """Whether fp32 values rest elsewhere: masters, or parameters that are their own."""
        if not self.offload.any:
            return False
        return self.plan.precision.has_masters or self.parameters

    @property
    def gradients(self) -> bool:
        """Whether mean gradients do."""
        return self.offload.gradients != "device"

    @property
    def parameters(self) -> bool:
        """Whether a rank keeps nothing of its parameters in memory."""
        return self.offload.parameters != "device"

    @property
    def parts(self) -> int:
        """fp32 numbers of every trainable element that rest elsewhere."""
        return (self.values + self.gradients + self.states) if self.offload.any else 0

    @property
    def _shard(self) -> int:
        """Trainable elements of a rank, padding included."""
        return sum(unit.layout.shard_numel for unit in self.plan.trainable_units)

    @property
    def nbytes(self) -> int:
        """Bytes of a rank on the medium, without the ends of pages."""
        return self.parts * FP32_BYTES * self._shard

    @property
    def staging_nbytes(self) -> int:
        """Bytes of a rank through which everything passes; the same for any model."""
        if not self.offload.any:
            return 0
        window = -(-self.offload.window // PAGE) * PAGE
        return self.offload.buffers * (window + MOST_PARTS * PAGE)

    def footprint(self, footprint: Footprint) -> Footprint:
        """That of the transport, where parameters leave memory between uses."""
        return dataclasses.replace(footprint, lasting=False) if self.parameters else footprint

    def memory(self, footprint: Footprint | None = None) -> MemoryPlan:
        """Bytes that a rank holds in the memory that it computes in; what rests elsewhere is in ``away``."""
        held = self.plan.memory(
            optimizer_bytes=FP32_BYTES * self.states,
            footprint=self.footprint(footprint or Footprint()),
        )
        if not self.offload.any:
            return held
        item = self.plan.precision.param_itemsize
        if self.parameters:
            frozen = sum(u.layout.shard_numel for u in self.plan.units if not u.trainable)
            held = dataclasses.replace(held, parameters=item * frozen)
        elif self.values and self.plan.stage.shards_parameters:
            # The masters are elsewhere; a copy in the parameters' own dtype stays, from which they are gathered.
            everything = sum(unit.layout.shard_numel for unit in self.plan.units)
            held = dataclasses.replace(held, parameters=max(held.parameters, item * everything))
        if self.gradients:
            sizes = sorted((u.layout.shard_numel for u in self.plan.trainable_units), reverse=True)
            landing = FP32_BYTES * sum(sizes[:LANDING])
            whole = FP32_BYTES * self._shard if self.plan.stage.shards_optimizer else 0
            held = dataclasses.replace(held, gradients=held.gradients - whole + landing)
        return dataclasses.replace(
            held,
            master=0 if self.values else held.master,
            optimizer=0,
            staging=self.staging_nbytes,
            away=self.nbytes,
        )

    def traffic(
        self, *, rank: int = 0, micro_steps: int = 1, synced: int = 1, first: bool = False
    ) -> TierTraffic:
        """What a rank moves in one step in which every parameter gets a gradient.

        Args:
            rank: whose step; ranks differ by windows that are nothing but padding, which no step touches.
            micro_steps: forward-backward passes in the step.
            synced: how many of them reduce gradients.
            first: whether the optimizer has no state yet, so that none is read.
        """
        if not self.offload.any:
            return TierTraffic()
        stepped = sum(self._stepped(unit, rank) for unit in self.plan.trainable_units)
        states = 0 if first else self.states
        again = max(synced - 1, 0) * self.gradients  # a gradient that is added to comes back first
        reads = self._shard * (2 * micro_steps * self.parameters + again)
        reads += stepped * (self.values + self.gradients + states)
        writes = self._shard * synced * self.gradients + stepped * (self.values + self.states)
        return TierTraffic(FP32_BYTES * reads, FP32_BYTES * writes)

    def _stepped(self, unit: UnitSpec, rank: int) -> int:
        """Elements of the windows of ``rank`` that hold a parameter."""
        windows = windows_of(unit.layout, unit.groups, rank, self.offload.window, self.parts)
        owned = len(unit.layout.shard_range(rank))
        return sum(len(window) for window in windows if window.start < owned)

    def describe(self) -> str:
        """Lines for a run header; empty where nothing rests elsewhere."""
        if not self.offload.any:
            return ""
        mib = 2**20
        moved = self.traffic()
        return (
            f"offload: {self.offload.describe()}; {self.nbytes / mib:,.1f} MiB per rank, through "
            f"{self.staging_nbytes / mib:,.1f} MiB of staging; a step of one micro-batch reads "
            f"{moved.read_nbytes / mib:,.1f} MiB and writes {moved.written_nbytes / mib:,.1f}"
        )
