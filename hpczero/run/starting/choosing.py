"""The settings of a run that was asked to choose them itself (``--parallel.auto``).

A run chooses once, before anything is allocated, and never in between.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpczero.accelerator import Accelerator
from hpczero.errors import ConfigError
from hpczero.job import log
from hpczero.job.limits import rooms
from hpczero.job.topology import Topology
from hpczero.memory.buffers import DTYPES
from hpczero.models import GPTConfig
from hpczero.options.config import ParallelOptions, RunConfig
from hpczero.options.reading import load_toml
from hpczero.plan.offload import Medium
from hpczero.plan.peak import PlannedRun
from hpczero.plan.precision import Precision
from hpczero.plan.sizing import Batch
from hpczero.planner.choice import Choice, Freedom, Predicted, lines
from hpczero.planner.search import balance_on, prediction_on, search
from hpczero.predict.machine import Machine, machine_of
from hpczero.probe.job import probe_job
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.room_check import fitting_on, run_of

CHOSEN = ("optimizer", "gradients", "parameters", "fraction", "step")  # of offload


@dataclass(frozen=True)
class Chosen:
    """The settings of a run.

    Attributes:
        config: with the choice among the options.
        model: with or without checkpointing.
        batch: as it is cut now.
        predicted: what was chosen, and what is expected of it; None for the choice of an earlier start.
    """

    config: RunConfig
    model: GPTConfig
    batch: Batch
    predicted: Predicted | None


def choose_settings(
    config: RunConfig, model: GPTConfig, batch: Batch, topology: Topology, accelerator: Accelerator
) -> Chosen:
    """Probe the machine with all ranks, and choose. Collective over world; equal on every rank.

    What the options set to another value than the default stays, and so does the global batch. ``model`` has the
    tokenizer's vocabulary.

    Raises:
        ConfigError: nothing fits.
    """
    with topology.agreed("plan the run"):
        base = run_of(config, model, batch, topology, is_host=accelerator.is_host)
        freedom = freedom_of(config, accelerator)
    choice, troubles = choose_here(base, model, freedom, topology, accelerator)
    for trouble in troubles:
        log.info("planner: %s", trouble)
    best = choice.best
    with topology.agreed("choose the settings"):
        if best is None:
            raise ConfigError(nothing_fits(choice))
    assert best is not None, "agreed"
    for line in lines(choice):
        log.info("planner: %s", line)
    return applied(config, model, batch, best)


def choose_here(
    base: PlannedRun,
    model: GPTConfig,
    freedom: Freedom,
    topology: Topology,
    accelerator: Accelerator,
) -> tuple[Choice, list[str]]:
    """The choice on this machine, and what could not be probed. Collective over world; equal on every rank.

    ``base`` is what is to be trained; ``freedom`` says what may be chosen.
    """
    folder = None if freedom.folder is None else Path(freedom.folder)
    dtype = DTYPES[Precision.of(base.precision).param]
    measured, troubles = probe_job(topology, accelerator, dtype=dtype, folder=folder)
    machine = machine_of(
        measured, ranks_per_node=topology.local_size, memory_nbytes=1.0, title="this machine"
    )
    with topology.agreed("choose the settings"):
        _check_measured(base, machine, troubles)

    def known(media: Sequence[Medium]) -> list[Medium]:
        return [medium for medium in media if all(machine.tier_rates(medium))]

    free = dataclasses.replace(freedom, media=known(freedom.media), rests=known(freedom.rests))
    fits_here = fitting_on(base, topology, accelerator)
    room = TierRoom.of(free, accelerator)

    def agree(mine: Sequence[int]) -> list[int]:
        """Ranks may have different limits: what does not fit one of them fits none."""
        told = topology.world.gather_text(json.dumps(list(mine)))
        return [max(column) for column in zip(*map(json.loads, told), strict=True)]

    choice = search(
        base,
        free,
        prediction_on(machine, measured),
        fits=lambda run: room.holds(run, topology.local_size) and fits_here(run),
        balance=balance_on(base, machine, measured),
        agree=agree,
    )
    return choice, troubles


def _check_measured(base: PlannedRun, machine: Machine, troubles: list[str]) -> None:
    """Refuse a tier that was asked for and whose rates are not known: every setting would rest there."""
    medium = base.offload.medium
    if not base.offload.any or all(machine.tier_rates(medium)):
        return
    why = "; ".join(text for text in troubles if f"on {medium}" in text)
    why = (
        why or "its ranks compute there themselves, so nothing lies between that could be measured"
    )
    raise ConfigError(
        f"parallel.auto: got offload on {medium}, whose speed on this machine is not known: {why}; expected another "
        "place, or the options of the run without parallel.auto"
    )


def freedom_of(config: RunConfig, accelerator: Accelerator) -> Freedom:
    """What the options leave open."""
    parallel, model, train = config.parallel, config.model, config.train
    offload, asked = config.offload, config.activations
    media: list[Medium] = [] if accelerator.is_host else ["host"]
    folder = offload.folder or asked.folder
    rests: list[Medium] = [*media, "disk"] if folder is not None else [*media]
    if offload.folder is not None:
        media.append("disk")
    given = parallel.stage != ParallelOptions.stage
    recomputed = model.checkpoint_activations or asked.checkpointing != "none"
    return Freedom(
        stages=(parallel.stage,) if given else (0, 1, 2, 3),
        checkpointing=(True,) if recomputed else (False, True),
        media=media,
        host_step=not offload.delayed,
        fractions=offload.optimizer == "device" and not offload.delayed,
        rests=[] if recomputed else rests,
        folder=folder,
        micro_batches=train.micro_batch is None and train.accumulation is None,
    )


@dataclass(frozen=True)
class TierRoom:
    """Bytes that are free for tiers by medium, of all ranks of this node. Other media are not asked about."""

    free: Mapping[Medium, float]

    @classmethod
    def of(cls, freedom: Freedom, accelerator: Accelerator) -> TierRoom:
        """What this node has now. Not collective."""
        free: dict[Medium, float] = {}
        if freedom.folder is not None:
            with suppress(OSError):
                found = os.statvfs(freedom.folder)
                free["disk"] = found.f_bavail * found.f_frsize
        if not accelerator.is_host:
            of_host = [room for room in rooms() if room.kind == "resident"]
            free["host"] = min((room.nbytes - room.used for room in of_host), default=0)
        return cls(free)

    def holds(self, run: PlannedRun, ranks: int) -> bool:
        """Whether it takes what so many ranks of this node would let rest there."""
        asked = {medium: run.resting(medium) * ranks for medium in self.free}
        return all(nbytes <= self.free[medium] for medium, nbytes in asked.items())


def earlier_settings(config: RunConfig, folder: RunFolder) -> str:
    """What the start that this one goes on with chose for itself, as JSON; empty if it did not. Rank 0 calls it.

    Another cut of the batch gives other last bits, and another stage other peaks, so a run keeps what it chose first.
    """
    goes_on = config.resume.from_ == "auto" and not config.run.overwrite and folder.has_checkpoints
    if not goes_on or not folder.config.exists():
        return ""
    with suppress(ConfigError):  # whoever chooses where to begin says what is wrong
        earlier = load_toml(folder.config, RunConfig)
        settings = {
            "stage": earlier.parallel.stage,
            "micro_batch": earlier.train.micro_batch,
            "checkpointing": earlier.model.checkpoint_activations,
            "parts": {name: getattr(earlier.offload, name) for name in CHOSEN},
            "rest": earlier.activations.rest,
        }
        return json.dumps(settings) if earlier.parallel.auto else ""
    return ""


def taken_over(
    text: str, config: RunConfig, model: GPTConfig, batch: Batch, ranks: int
) -> Chosen | None:
    """The settings of an earlier start; None where its micro-batch cannot make up the batch of these ranks."""
    earlier = json.loads(text)
    cut = {"micro_batch": earlier.pop("micro_batch"), "accumulation": None}
    train = dataclasses.replace(config.train, global_batch=batch.global_batch, **cut)
    try:
        again = Batch.resolve(train, ranks)
    except ConfigError:
        return None
    log.info("planner: goes on with the settings that an earlier start of this run chose")
    return _chosen(dataclasses.replace(config, train=train), model, again, **earlier)


def applied(config: RunConfig, model: GPTConfig, batch: Batch, best: Predicted) -> Chosen:
    """The choice as options."""
    run = best.run
    train = dataclasses.replace(config.train, micro_batch=run.micro_batch, accumulation=None)
    return _chosen(
        dataclasses.replace(config, train=train),
        model,
        Batch(batch.global_batch, run.micro_batch, run.accumulation),
        stage=run.stage,
        parts={name: getattr(run.offload, name) for name in CHOSEN},
        checkpointing=run.checkpointing,
        rest=run.kept.rest if run.checkpointing else "device",
        predicted=best,
    )


def _chosen(
    config: RunConfig,
    model: GPTConfig,
    batch: Batch,
    *,
    stage: Any,  # a Literal of the options
    parts: Mapping[str, Any],
    checkpointing: bool,
    rest: Any,
    predicted: Predicted | None = None,
) -> Chosen:
    if config.activations.checkpointing != "none":  # asked for there, and how
        checkpointing = config.model.checkpoint_activations
        rest = config.activations.rest
    return Chosen(
        dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, stage=stage),
            offload=dataclasses.replace(config.offload, **parts),
            activations=dataclasses.replace(config.activations, rest=rest),
            model=dataclasses.replace(config.model, checkpoint_activations=checkpointing),
        ),
        dataclasses.replace(model, checkpoint_activations=checkpointing),
        batch,
        predicted,
    )


def nothing_fits(choice: Choice) -> str:
    """What the error says."""
    least = choice.too_large
    closest = "" if least is None else f"; the least is {least.run.memory.total:,} bytes"
    return (
        f"parallel.auto: none of {choice.tried} settings fits the memory of these ranks{closest}; give offload.folder, "
        "a folder on a disk of each node, for what does not fit, use more nodes, or choose a smaller model"
    )
