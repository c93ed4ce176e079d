"""The search: all settings that a planner may choose, held against memory, ordered by their time.

Owns: the order of questions, and that all ranks ask the same ones. Must not know: how bytes or seconds are counted, how
ranks agree, torch, MPI.

    all or nothing on a tier -> which fit -> the least part of those that need a tier -> which fit -> the choice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from hpczero.models.config import GPTConfig
from hpczero.plan.offload import NOTHING_AWAY
from hpczero.plan.offloaded import least_fraction, short_fraction, units_away
from hpczero.plan.peak import Run
from hpczero.planner.choice import Choice, Freedom, candidates, choose
from hpczero.predict.job import Job, balance_of
from hpczero.predict.machine import Kernels, Machine, Roofline
from hpczero.predict.model import Prediction, predict

# Settings with a part of the units on a tier: the least with which the others fit, and the host's own share of a step.
#
# Bytes that stay need not move, so of a setting that does not fit without its tier the least fraction that fits is
# tried beside all of it. Where the setting fits without a tier, a disk saves no time; a host that takes a part of the
# step may, up to where both sides end together.


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


def foretell_on(
    model: GPTConfig, machine: Machine, kernels: Kernels | None = None
) -> Callable[[Run], Prediction]:
    """What foretells the step of any run of ``model`` on ``machine``.

    Args:
        model: sizes of the model.
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """

    def foretell(run: Run) -> Prediction:
        job = Job(
            model=dataclasses.replace(model, context=run.sequence),
            machine=machine,
            ranks=run.ranks,
            stage=run.stage,
            precision=run.precision,
            reduce=run.reduce,
            micro_batch=run.micro_batch,
            accumulation=run.accumulation,
            checkpointing=run.checkpointing,
            transport=run.transport,
            kernels=kernels,
            ranks_per_node=run.local_size,
            offload=run.offload,
            kept=run.kept,
        )
        return predict(job)

    return foretell


def balance_on(run: Run, machine: Machine, kernels: Kernels | None = None) -> float | None:
    """The fraction with which host and device end their updates of ``run`` together; None: no such host is known.

    Args:
        run: with its precision; what else it chooses does not matter.
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """
    itemsize = run.plan.precision.param_itemsize
    work = kernels or Roofline(machine, run.precision, itemsize)
    return balance_of(machine, work, up=itemsize)


Agree = Callable[[Sequence[int]], Sequence[int]]


def search(
    run: Run,
    freedom: Freedom,
    foretell: Callable[[Run], Prediction],
    *,
    fits: Callable[[Run], bool],
    balance: float | None = None,
    agree: Agree = tuple,
) -> Choice:
    """The choice. It is as collective as ``agree``.

    Args:
        run: as it was asked for.
        freedom: what may differ from it.
        foretell: the step of a run; the same on every rank.
        fits: whether a run fits what this rank sees.
        balance: fraction with which host and device end their updates together; None: not known.
        agree: of each number, the largest that any rank has; what does not fit one rank fits none.
    """
    fitting: dict[int, bool] = {}

    def hold(runs: Sequence[Run]) -> None:
        short = agree([int(not fits(one)) for one in runs])
        fitting.update({id(one): not bad for one, bad in zip(runs, short, strict=True)})

    runs = list(candidates(run, freedom))
    hold(runs)
    if freedom.fractions:
        wanted = worth_a_part(runs, lambda one: fitting[id(one)])
        least = agree([least_units(one, fits) for one in wanted])
        more = parts(wanted, least, runs, balance)
        hold(more)
        runs += more
    return choose(runs, lambda one: fitting[id(one)], foretell)
