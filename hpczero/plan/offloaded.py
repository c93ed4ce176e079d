"""OffloadedPlan: bytes of one rank where parts of its shards rest on a memory tier.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 3 and 5; the table is in docs/tiers.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hpczero.plan.footprint import Footprint
from hpczero.plan.layout import ShardLayout, UnitSpec
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offload import Offload
from hpczero.plan.plan import FP32_BYTES, Plan

# Windows: how a rank's shard of a unit is cut into what passes through memory at a time.
#
# A long tensor may be stepped on in pieces without changing a bit if every piece begins on a whole vector of the
# processor, counted from where the long tensor begins: torch's fused kernels round the last elements of a tensor, which
# fill no vector, in another way (torch 2.13). Neighbours of one optimizer group are one long tensor, so cuts lie at
# multiples of ``ALIGN`` elements from where such neighbours begin, or between them.

ITEM = 4  # bytes of fp32
ALIGN = 64  # elements; a multiple of what any vector unit holds


def runs_of_groups(layout: ShardLayout, groups: Sequence[int], rank: int) -> list[range]:
    """Elements of ``rank``'s shard, counted in it, that are neighbours of one optimizer group; padding is in none.

    Args:
        layout: of the unit.
        groups: (slots,) optimizer group of each.
        rank: whose shard.
    """
    begin = rank * layout.shard_numel
    parts: list[tuple[int, range]] = []
    for slot, group in zip(layout.slots, groups, strict=True):
        part = layout.overlap(rank, slot.name)
        if part:
            start = slot.offset + part.start - begin
            parts.append((group, range(start, start + len(part))))
    found = []
    for _, neighbours in itertools.groupby(parts, key=lambda entry: entry[0]):
        ranges = [part for _, part in neighbours]
        found.append(range(ranges[0].start, ranges[-1].stop))
    return found


def cut(numel: int, runs: Sequence[range], most: int) -> list[range]:
    """Windows of at most ``most`` elements that together are ``range(numel)``.

    Args:
        numel: elements of the shard, padding included.
        runs: ascending; inside of each, cuts are aligned to its begin.
        most: elements; at least ``2 * ALIGN``.

    Raises:
        ValueError: ``most`` is too small.
    """
    if most < 2 * ALIGN:
        raise ValueError(f"a window has at least {2 * ALIGN} elements, got {most}")
    windows = []
    start = 0
    while start < numel:
        stop = min(start + most, numel)
        inside = next((run for run in runs if run.start < stop < run.stop), None)
        if inside is not None:
            stop = max(stop - (stop - inside.start) % ALIGN, start + 1)
        windows.append(range(start, stop))
        start = stop
    return windows


def windows_of(
    layout: ShardLayout,
    groups: Sequence[int],
    rank: int,
    window_nbytes: int,
    element_nbytes: int,
    *,
    by_shard: bool = False,
) -> list[range]:
    """The windows of ``rank``'s shard of a unit, if all parts of an element pass together.

    Args:
        layout: of the unit.
        groups: (slots,) optimizer group of each.
        rank: whose shard.
        window_nbytes: of all parts of one window at most.
        element_nbytes: of all parts of one element.
        by_shard: cut at multiples of ``ALIGN`` elements of the shard, wherever neighbours of a group begin.

    Raises:
        ValueError: ``window_nbytes`` is too small.
    """
    most = window_nbytes // element_nbytes // ALIGN * ALIGN
    runs = [] if by_shard else runs_of_groups(layout, groups, rank)
    return cut(layout.shard_numel, runs, most)


# Splitting: which units of a model rest elsewhere, where only a part of them does.
#
# Units are given in the order in which forward uses them; backward reduces the last one first. What stays on the device
# is a beginning of that order: gradients of the others leave early, and an update elsewhere has the rest of the
# backward to hide behind.
#
# Source: DeepSpeed's Twin-Flow (``ratio``), 2023, for an update on two sides at once; Lian et al., SuperOffload, arXiv
# 2509.21271, for keeping on the device what is reduced last.

HALF_AN_ELEMENT = 0.5  # a fraction in floating point times a count of elements is never nearer than this to the next


def units_away(sizes: Sequence[int], fraction: float) -> int:
    """How many units rest elsewhere, counted from the last: the fewest with at least ``fraction`` of all elements.

    Args:
        sizes: (units,) elements of each.
        fraction: of all elements, 0 to 1.
    """
    if fraction <= 0:
        return 0
    if fraction >= 1:
        return len(sizes)  # also those without an element
    wanted = fraction * sum(sizes) - HALF_AN_ELEMENT
    return next(i for i, away in enumerate(accumulate(reversed(sizes)), start=1) if away >= wanted)


def cuts(sizes: Sequence[int]) -> list[float]:
    """(units + 1,) the fraction that ``units_away`` turns into 0, 1, 2 ... units."""
    whole = sum(sizes)
    ends = [0, *accumulate(reversed(sizes))]
    return [away / whole if whole else 0.0 for away in ends[:-1]] + [1.0]


def least_fraction(sizes: Sequence[int], held: Callable[[float], int], budget: int) -> float | None:
    """What does not fit, and no more: the least fraction with which a rank holds at most ``budget`` bytes.

    Bytes may grow only where a unit leaves that is larger than all before it, as whole units pass through memory; in
    between they fall, so that halving finds the least.

    Args:
        sizes: (units,) elements of each.
        held: bytes that a rank holds on the device, of a fraction.
        budget: bytes of the device.

    Returns:
        One of ``cuts``; None where not even everything elsewhere is enough.
    """
    places = cuts(sizes)

    def fits(count: int) -> bool:
        return held(places[count]) <= budget

    if fits(0):
        return places[0]
    for begin, end in pairwise(_larger_than_before(sizes)):
        if not fits(end - 1):
            continue
        below, above = begin - 1, end - 1
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if fits(middle) else (middle, above)
        return places[above]
    return None


def _larger_than_before(sizes: Sequence[int]) -> list[int]:
    """How many units are away when one larger than all others away has left; and one more than all units."""
    found, most = [], -1
    for count, size in enumerate(reversed(sizes), start=1):
        if size > most:
            found.append(count)
            most = size
    return [*found, len(sizes) + 1]


def short_fraction(sizes: Sequence[int], count: int) -> float:
    """The fraction of fewest decimals that means the last ``count`` units, so that it can be typed."""
    if count >= len(sizes):
        return 1.0
    exact = cuts(sizes)[count]
    for digits in range(1, 16):
        scale = 10.0**digits
        fraction = math.floor(exact * scale) / scale
        if units_away(sizes, fraction) == count:
            return fraction
    return exact


@dataclass(frozen=True)
class Sides:
    """What an update costs on either side, for one element of a rank's shard.

    T(r) = max(r n (1 / host + down / device_to_host + up / host_to_device), (1 - r) n / device)

    Attributes:
        host: elements per second that the host updates.
        device: elements per second that the device updates.
        down: bytes of a gradient that go to the host: 4, if none of them hides behind backward.
        up: bytes of a parameter that come back: 4 in fp32, 2 in half.
        device_to_host, host_to_device: bytes per second of a rank.
    """

    host: float
    device: float
    down: float
    up: float
    device_to_host: float
    host_to_device: float

    @property
    def host_s(self) -> float:
        """Seconds of one element on the host, copies included."""
        return 1 / self.host + self.down / self.device_to_host + self.up / self.host_to_device

    def step_s(self, numel: int, fraction: float) -> float:
        """Seconds of an update of ``numel`` elements of which a fraction is the host's: both sides work at once."""
        return max(fraction * numel * self.host_s, (1 - fraction) * numel / self.device)

    @property
    def balance(self) -> float:
        """The fraction at which both sides end together; a larger one takes longer, a smaller one saves memory less."""
        on_device = 1 / self.device
        return on_device / (on_device + self.host_s)


ADAM_STATES = 2
PAGE = 4096  # bytes; the end of a part is filled up to one
MOST_PARTS = 16  # of a record: a block of staging has so many ends of pages to spare
# Gradients that are in memory at a time: one is being made, one is being reduced or written.
LANDING = 2


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
        a_pass = (self.mirror or FP32_BYTES) if self.parameters else 0  # of an element
        reads = self._shard * (2 * micro_steps * a_pass + FP32_BYTES * again)
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
