"""Settings with a part of the units on a tier: the least with which the others fit, and the host's own share of a step.

Owns: which part of which settings is worth a try. Must not know: how long anything takes, how memory is found, torch,
MPI.

Bytes that stay need not move, so of a setting that does not fit without its tier the least fraction that fits is tried
beside all of it. Where the setting fits without a tier, a disk saves no time; a host that takes a part of the step may,
up to where both sides end together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from hpczero.plan.offload import NOTHING_AWAY
from hpczero.plan.offloaded import least_fraction, short_fraction, units_away
from hpczero.plan.peak import Run


def worth_a_part(runs: Iterable[Run], fits: Callable[[Run], bool]) -> list[Run]:
    """Of ``runs``, those with all units on a tier that would not fit without it.

    Args:
        runs: with what rests on tiers whole.
        fits: whether one of them fits; asked of no others.
    """
    everything = list(runs)
    resident = {_beside(run) for run in everything if not run.offload.any and fits(run)}
    return [run for run in everything if _is_whole(run) and _beside(run) not in resident]


def least_units(run: Run, fits: Callable[[Run], bool]) -> int:
    """How many units must rest elsewhere so that ``run`` fits: the fewest; more than it has if it never does."""
    sizes = sizes_of(run)
    fraction = least_fraction(sizes, lambda wanted: int(not fits(_with(run, wanted))), 0)
    return len(sizes) + 1 if fraction is None else units_away(sizes, fraction)


def parts(
    runs: Iterable[Run], least: Sequence[int], others: Iterable[Run], balance: float | None
) -> list[Run]:
    """The same runs with a part of their units elsewhere.

    Args:
        runs: which ``worth_a_part`` has found.
        least: of each, the most ``least_units`` of all ranks.
        others: all runs; those on which the host steps are tried at the balance.
        balance: fraction with which host and device end their updates together; None: not known.
    """
    found = [_with_units(run, count) for run, count in zip(runs, least, strict=True)]
    if balance is not None:
        for run in others:
            if _is_whole(run) and run.offload.on_host:
                found.append(_with_units(run, units_away(sizes_of(run), balance)))
    seen: dict[tuple[object, ...], Run] = {}
    for part in found:
        if part is not None:
            seen.setdefault((*_beside(part), part.offload), part)
    return list(seen.values())


def sizes_of(run: Run) -> list[int]:
    """(units,) elements of each, in unit order."""
    return [unit.layout.numel for unit in run.plan.trainable_units]


def _with_units(run: Run, count: int) -> Run | None:
    """``run`` with the last ``count`` units elsewhere; None where that is all, none, or more than there are."""
    sizes = sizes_of(run)
    if not 0 < count < len(sizes):
        return None
    return _with(run, short_fraction(sizes, count))


def _with(run: Run, fraction: float) -> Run:
    offload = dataclasses.replace(run.offload, fraction=fraction) if fraction else NOTHING_AWAY
    return dataclasses.replace(run, offload=offload)


def _is_whole(run: Run) -> bool:
    return run.offload.any and run.offload.fraction == 1


def _beside(run: Run) -> tuple[object, ...]:
    """What a run is beside its offload."""
    return run.stage, run.checkpointing, run.kept, run.micro_batch
