"""Splitting: which units of a model rest elsewhere, where only a part of them does.

Owns: the cut between units, and the formulas that propose one. Must not know: torch, tiers, what a unit is made of.

Units are given in the order in which forward uses them; backward reduces the last one first. What stays on the device
is a beginning of that order: gradients of the others leave early, and an update elsewhere has the rest of the backward
to hide behind.

Source: DeepSpeed's Twin-Flow (``ratio``), 2023, for an update on two sides at once; Lian et al., SuperOffload,
arXiv 2509.21271, for keeping on the device what is reduced last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one unit in a step.

    Attributes:
        backward: of its backward on the device.
        device_step: of its update there.
        host_step: of its gradient's way to the host, its update there, and its parameters' way back.
    """

    backward: float
    device_step: float
    host_step: float


def hidden_split(times: Sequence[UnitTimes]) -> int:
    """The fewest units, from the first on, that must stay on the device so that nobody waits for the host.

    The host begins with a unit when its gradient is there, and takes one after the other. The device goes on with the
    backward of the units before it, and then updates its own. What is reduced last cannot hide, so it stays.

    Args:
        times: (units,) in the order of forward.
    """
    for kept in range(len(times) + 1):
        clock = host_free = 0.0
        for place, unit in reversed(list(enumerate(times))):
            clock += unit.backward
            if place >= kept:
                host_free = max(host_free, clock) + unit.host_step
        device_free = clock + sum(unit.device_step for unit in times[:kept])
        if host_free <= device_free:
            return kept
    return len(times)
