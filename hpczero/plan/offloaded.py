"""OffloadedPlan: bytes of one rank where parts of its shards rest on a memory tier.

Owns: what is held in memory besides, what rests on the medium, and what moves in a step. Must not know: torch, tiers,
how anything is moved.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 3 and 5; the table is in docs/tiers.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpczero.plan.footprint import Footprint
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offload import Offload
from hpczero.plan.plan import FP32_BYTES, Plan
from hpczero.plan.splitting import units_away
from hpczero.plan.unit_spec import UnitSpec
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

    @cached_property
    def away(self) -> tuple[UnitSpec, ...]:
        """Units that have parts elsewhere, in unit order: a fraction of them, those that forward uses last."""
        units = self.plan.trainable_units
        if not self.offload.any:
            return ()
        count = units_away([unit.layout.numel for unit in units], self.offload.fraction)
        return units[len(units) - count :]

    @property
    def values(self) -> bool:
        """Whether fp32 values rest elsewhere: masters, or parameters that are their own."""
        if not self.offload.any:
            return False
        return self.plan.precision.has_masters or self.parameters or self.offload.on_host

    @property
    def mirror(self) -> int:
        """Bytes of an element of the copy of values in half precision that rests beside them; 0 for none.

        Passes read it, or the host sends values up from it.
        """
        half = self.plan.precision.has_masters
        used = self.parameters or self.offload.on_host
        return self.plan.precision.param_itemsize if half and used else 0

    @property
    def gradients(self) -> bool:
        """Whether mean gradients do."""
        return self.offload.any and self.offload.gradients != "device"

    @property
    def parameters(self) -> bool:
        """Whether a rank keeps nothing of those units' parameters in memory."""
        return self.offload.any and self.offload.parameters != "device"

    @property
    def parts(self) -> int:
        """fp32 numbers of every element of those units that rest elsewhere."""
        return (self.values + self.gradients + self.states) if self.offload.any else 0

    @property
    def element_nbytes(self) -> int:
        """Bytes of all parts of an element of those units that rest elsewhere."""
        return self.parts * FP32_BYTES + self.mirror

    @property
    def pass_nbytes(self) -> int:
        """Bytes of an element that a forward or a backward reads."""
        return (self.mirror or FP32_BYTES) if self.parameters else 0

    @property
    def _shard(self) -> int:
        """Elements of a rank that have parts elsewhere, padding included."""
        return sum(unit.layout.shard_numel for unit in self.away)

    @property
    def share(self) -> float:
        """Of all trained elements, how many have parts elsewhere; 0 to 1."""
        trained = sum(unit.layout.numel for unit in self.plan.trainable_units)
        return sum(unit.layout.numel for unit in self.away) / trained if trained else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of a rank on the medium, without the ends of pages."""
        return self.element_nbytes * self._shard

    @property
    def staging_nbytes(self) -> int:
        """Bytes of a rank through which everything passes; the same for any model."""
        if not self.offload.any:
            return 0
        window = -(-self.offload.window // PAGE) * PAGE
        return self.offload.buffers * (window + MOST_PARTS * PAGE)

    def footprint(self, footprint: Footprint) -> Footprint:
        """That of the transport for units whose parameters leave memory between uses."""
        return dataclasses.replace(footprint, lasting=False) if self.parameters else footprint

    def memory(self, footprint: Footprint | None = None) -> MemoryPlan:
        """Bytes that a rank holds in the memory that it computes in; what rests elsewhere is in ``away``.

        Args:
            footprint: of the transport, as it is without offload.
        """
        footprint = footprint or Footprint()
        states = FP32_BYTES * self.states
        apart = self.gradients
        everything = self.plan.memory(optimizer_bytes=states, footprint=footprint, apart=apart)
        if not self.offload.any:
            return everything
        gone = {id(unit) for unit in self.away}
        stay = [unit for unit in self.plan.units if id(unit) not in gone]
        here = self._of(stay).memory(optimizer_bytes=states, footprint=footprint, apart=apart)
        away = self._of(self.away).memory(footprint=self.footprint(footprint), apart=apart)
        item = self.plan.precision.param_itemsize
        if self.parameters:
            parameters = 0
        elif self.values and self.plan.stage.shards_parameters:
            # The masters are elsewhere; a copy in the parameters' own dtype stays, from which they are gathered.
            parameters = max(away.parameters, item * self._shard)
        else:
            parameters = away.parameters
        gradients = here.gradients + away.gradients
        if self.gradients:
            gradients += FP32_BYTES * (self._landing(stay) - self._shard)
        lasting = footprint.lasting and self.parameters  # here alone: what is away is given back
        return MemoryPlan(
            parameters=here.parameters + parameters,
            master=here.master + (0 if self.values else away.master),
            gradients=gradients,
            optimizer=here.optimizer,
            unsharded=away.unsharded if lasting else everything.unsharded,
            exchange=everything.exchange,
            staging=self.staging_nbytes,
            away=self.nbytes,
        )

    def _landing(self, stay: Sequence[UnitSpec]) -> int:
        """Elements of gradients that are in memory at a time beyond all of those that stay, which come last."""
        gone = [unit.layout.shard_numel for unit in self.away]
        kept = [unit.layout.shard_numel for unit in stay if unit.trainable]
        at_once = [sum(sorted(gone, reverse=True)[:LANDING])]
        if kept and gone:
            at_once.append(gone[0] + kept[-1])  # backward goes from the one to the other
        return max(0, max(at_once) - sum(kept))

    def _of(self, units: Sequence[UnitSpec]) -> Plan:
        """The plan of some of the units."""
        return dataclasses.replace(self.plan, units=tuple(units))

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
        stepped = sum(self._stepped(unit, rank) for unit in self.away)
        states = 0 if first else self.states
        again = max(synced - 1, 0) * self.gradients  # a gradient that is added to comes back first
        reads = self._shard * (2 * micro_steps * self.pass_nbytes + FP32_BYTES * again)
        writes = self._shard * FP32_BYTES * synced * self.gradients
        if self.offload.on_host:  # nothing of what is stepped on moves; new values go up
            sent = 0 if self.parameters else self.plan.precision.param_itemsize * stepped
            return TierTraffic(reads + sent, writes)
        reads += stepped * FP32_BYTES * (self.values + self.gradients + states)
        writes += stepped * (FP32_BYTES * (self.values + self.states) + self.mirror)
        return TierTraffic(reads, writes)

    def _stepped(self, unit: UnitSpec, rank: int) -> int:
        """Elements of the windows of ``rank`` that hold a parameter."""
        windows = windows_of(
            unit.layout, unit.groups, rank, self.offload.window, self.element_nbytes
        )
        owned = len(unit.layout.shard_range(rank))
        return sum(len(window) for window in windows if window.start < owned)

    def describe(self) -> str:
        """Lines for a run header; empty where nothing rests elsewhere."""
        if not self.offload.any:
            return ""
        mib = 2**20
        moved = self.traffic()
        part = ""
        if self.offload.fraction < 1:
            units = len(self.plan.trainable_units)
            part = f"; {self.share:.1%} of the elements, the last {len(self.away)} of {units} units"
        return (
            f"offload: {self.offload.describe()}{part}; {self.nbytes / mib:,.1f} MiB per rank, through "
            f"{self.staging_nbytes / mib:,.1f} MiB of staging; a step of one micro-batch reads "
            f"{moved.read_nbytes / mib:,.1f} MiB and writes {moved.written_nbytes / mib:,.1f}"
        )
