"""The search: all settings that a planner may choose, compared with memory, ordered by their time.

all or nothing on a tier -> which fit -> the least part of those that need a tier -> which fit -> the choice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpczero.errors import ConfigError
from hpczero.job.mesh import DEGREES
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import check_model, divisors, mesh_of
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.offload import NOTHING_AWAY
from hpczero.plan.offloaded import least_fraction, short_fraction, units_away
from hpczero.plan.peak import PlannedRun
from hpczero.plan.precision import DType
from hpczero.plan.spread import Spread
from hpczero.planner.choice import Choice, Freedom, candidates, choose, in_order
from hpczero.predict.job import Job, sides_of
from hpczero.predict.machine import Kernels, Machine, Roofline
from hpczero.predict.model import Prediction, predict

# Layouts: which ranks should share what, of all degrees that the ranks allow.
#
# Tried are tensor degrees within a node, with sequence parallelism; pipelines; shards over all ranks that are left or
# over those of a node; a second shard at stage 3; ZeRO stages; every cut of the global batch; interleaving. Activations
# are checkpointed where a layout does not fit otherwise. Context is not tried: it is for samples that do not fit at
# all.

STAGES = (0, 1, 2, 3)
# Under a pipeline: at stage 2 gradients of all micro-batches wait whole, as at stage 1.
STAGED = (1, 3)
GROUPS = (1, 2, 4)  # of blocks on a stage


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits.

    Attributes:
        spread: the layout.
        options: what to type for it.
        step: its time.
    """

    spread: Spread
    options: LayoutOptions
    step: Prediction


def search_layouts(
    model: GPTConfig,
    machine: Machine,
    *,
    ranks: int,
    precision: str,
    global_batch: int,
    reduce: DType = "fp32",
) -> list[FoundLayout]:
    """Layouts that fit, the fastest by prediction first; of those within one percent the simplest comes first.

    Args:
        model: its context is the length of a sample.
        machine: each node is one like it.
        ranks: of the job.
        precision: name.
        global_batch: samples of a step.
        reduce: dtype of gradients' partial sums between nodes and replicas.
    """
    found = []
    for options, spread in layout_candidates(model, machine, ranks, precision, global_batch):
        fitting = _fitting(replace(spread, reduce=reduce), machine.usable)
        if fitting is not None:
            found.append(FoundLayout(fitting, options, predict(Job.of(fitting, machine))))
    return in_order(found, lambda each: each.step.step_s, _simplicity)


def layout_candidates(
    model: GPTConfig, machine: Machine, ranks: int, precision: str, global_batch: int
) -> Iterator[tuple[LayoutOptions, Spread]]:
    """Every layout that is tried, with what to type for it."""
    local = min(machine.ranks_per_node, ranks)
    for options in _degrees(model, ranks, local):
        try:
            check_model(options, model)
            mesh = mesh_of(options, ranks, local)
        except ConfigError:
            continue
        data = mesh.replicate * mesh.shard
        if options.shard == "node" and mesh.replicate == 1:
            continue  # the same as world
        if global_batch % data:
            continue
        for micro in divisors(global_batch // data):
            times = global_batch // data // micro
            if options.interleave > 1 and times % options.pipeline:
                continue
            for stage in STAGED if mesh.pipeline > 1 else STAGES:
                if options.secondary and stage != 3:
                    continue
                spread = Spread(
                    model,
                    mesh,
                    local,
                    stage=stage,
                    precision=precision,
                    micro_batch=micro,
                    accumulation=times,
                    sequence_parallel=options.sequence,
                    secondary=options.secondary,
                    schedule=options.order,
                    interleave=options.interleave,
                )
                transport = fastest_transport(
                    spread.shards.local, spread.shards.nodes, on_host=machine.shares_memory
                )
                on_device = not machine.shares_memory
                yield options, replace(spread, transport=transport, on_device=on_device)


def _degrees(model: GPTConfig, ranks: int, local: int) -> Iterator[LayoutOptions]:
    for tensor in divisors(local):
        for pipeline in divisors(ranks // tensor):
            for groups in GROUPS if pipeline > 1 else (1,):
                if pipeline * groups > model.layers:
                    continue
                for shard in ("world", "node"):
                    for second in (False, True) if pipeline == 1 and shard == "world" else (False,):
                        yield LayoutOptions(
                            tensor=tensor,
                            pipeline=pipeline,
                            shard=shard,
                            sequence=tensor > 1,
                            interleave=groups,
                            secondary=second,
                        )


def _fitting(spread: Spread, room: int) -> Spread | None:
    """The layout without checkpointing, else with it; None if it does not fit either way."""
    for checkpointing in (False, True):
        tried = replace(spread, checkpointing=checkpointing)
        if tried.needed_nbytes <= room:
            return tried
    return None


def _simplicity(found: FoundLayout) -> tuple[float, ...]:
    mesh, spread = found.spread.mesh, found.spread
    degrees = sum(degree > 1 for degree in (mesh.pipeline, mesh.replicate, mesh.tensor))
    return degrees, spread.secondary, spread.interleave, spread.checkpointing, found.step.step_s


def describe_layout(found: FoundLayout) -> str:
    """One line: degrees, settings, seconds, bytes."""
    spread = found.spread
    degrees = zip(DEGREES, spread.mesh.degrees, strict=True)
    said = [" x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one rank"]
    said.append(f"stage {spread.stage}")
    said.append(f"micro-batch {spread.micro_batch} x {spread.accumulation}")
    said += [f"interleaved {spread.interleave}"] * (spread.interleave > 1)
    said += ["second shard"] * spread.secondary + ["checkpointed"] * spread.checkpointing
    needed = spread.needed_nbytes / 1e9
    return (
        f"{', '.join(said)}: {found.step.step_s:,.3g} s, MFU {found.step.mfu:.1%}, {needed:.1f} GB"
    )


def options_of_layout(found: FoundLayout) -> str:
    """What to type for ``hpczero.train``."""
    spread = found.spread
    words = [f"--parallel.stage {spread.stage}"]
    words += [f"--parallel.{text.lower()}" for text in found.options.changed]
    words += [f"--parallel.reduce {spread.reduce}"] if spread.reduce != "fp32" else []
    words += [
        f"--train.micro_batch {spread.micro_batch} --train.accumulation {spread.accumulation}"
    ]
    words += ["--activations.checkpointing block"] * spread.checkpointing
    return " ".join(words)


# Settings with a part of the units on a tier: the least with which the others fit, and the host's own share of a step.
#
# Bytes that stay need not move, so of a setting that does not fit without its tier the least fraction that fits is
# tried beside all of it. Where the setting fits without a tier, a disk saves no time; a host that takes a part of the
# step may, up to where both sides end together.


def worth_a_part(
    runs: Iterable[PlannedRun], fits: Callable[[PlannedRun], bool]
) -> list[PlannedRun]:
    """Of ``runs``, those with all units on a tier that would not fit without it.

    Args:
        runs: with what rests on tiers whole.
        fits: whether one of them fits; asked of no others.
    """
    everything = list(runs)
    resident = {_beside(run) for run in everything if not run.offload.any and fits(run)}
    return [run for run in everything if _is_whole(run) and _beside(run) not in resident]


def least_units(run: PlannedRun, fits: Callable[[PlannedRun], bool]) -> int:
    """How many units must rest elsewhere so that ``run`` fits: the fewest; more than it has if it never does."""
    sizes = sizes_of(run)
    fraction = least_fraction(sizes, lambda wanted: int(not fits(_with(run, wanted))), 0)
    return len(sizes) + 1 if fraction is None else units_away(sizes, fraction)


def parts(
    runs: Iterable[PlannedRun],
    least: Sequence[int],
    others: Iterable[PlannedRun],
    balance: float | None,
) -> list[PlannedRun]:
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
    seen: dict[tuple[object, ...], PlannedRun] = {}
    for part in found:
        if part is not None:
            seen.setdefault((*_beside(part), part.offload), part)
    return list(seen.values())


def sizes_of(run: PlannedRun) -> list[int]:
    """(units,) elements of each, in unit order."""
    return [unit.layout.numel for unit in run.plan.trainable_units]


def _with_units(run: PlannedRun, count: int) -> PlannedRun | None:
    """``run`` with the last ``count`` units elsewhere; None where that is all, none, or more than there are."""
    sizes = sizes_of(run)
    if not 0 < count < len(sizes):
        return None
    return _with(run, short_fraction(sizes, count))


def _with(run: PlannedRun, fraction: float) -> PlannedRun:
    offload = replace(run.offload, fraction=fraction) if fraction else NOTHING_AWAY
    return replace(run, offload=offload)


def _is_whole(run: PlannedRun) -> bool:
    return run.offload.any and run.offload.fraction == 1


def _beside(run: PlannedRun) -> tuple[object, ...]:
    """What a run is beside its offload."""
    return run.stage, run.checkpointing, run.kept, run.micro_batch


def prediction_on(
    machine: Machine, kernels: Kernels | None = None
) -> Callable[[PlannedRun], Prediction]:
    """What predicts the step of any run on ``machine``.

    Args:
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """

    def prediction_of(run: PlannedRun) -> Prediction:
        job = Job.of(
            run,
            machine,
            kernels=kernels,
            model=replace(run.model, context=run.length),
            on_device=not machine.shares_memory,
            carriers=None,
        )
        return predict(job)

    return prediction_of


def balance_on(run: PlannedRun, machine: Machine, kernels: Kernels | None = None) -> float | None:
    """The fraction with which host and device end their updates of ``run`` together; None: no such host is known.

    Args:
        run: with its precision; what else it chooses does not matter.
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """
    itemsize = run.plan.precision.param_itemsize
    work = kernels or Roofline(machine, run.precision, itemsize)
    sides = sides_of(machine, work, up=itemsize)
    return None if sides is None else sides.balance


Agree = Callable[[Sequence[int]], Sequence[int]]


def search(
    run: PlannedRun,
    freedom: Freedom,
    prediction_of: Callable[[PlannedRun], Prediction],
    *,
    fits: Callable[[PlannedRun], bool],
    balance: float | None = None,
    agree: Agree = tuple,
) -> Choice:
    """The choice. It is as collective as ``agree``.

    Args:
        run: as it was asked for.
        freedom: what may differ from it.
        prediction_of: the step of a run; the same on every rank.
        fits: whether a run fits what this rank sees.
        balance: fraction with which host and device end their updates together; None: not known.
        agree: of each number, the largest that any rank has; what does not fit one rank fits none.
    """
    fitting: dict[int, bool] = {}

    def hold(runs: Sequence[PlannedRun]) -> None:
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
    return choose(runs, lambda one: fitting[id(one)], prediction_of)
