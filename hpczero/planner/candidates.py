"""The settings that a planner tries: stages, memory tiers, checkpointing and micro-batches of one global batch.

Owns: which there are, and in which order of simplicity. Must not know: what fits, how long anything takes, torch, MPI.
Here all units of a model rest on a tier or none; `hpczero.planner.fractions` adds those with a part of them. No setting
changes what is computed, so the delayed update is never tried: it is another algorithm, whose parameters are one step
late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hpczero.errors import PlanError
from hpczero.plan.offload import NOTHING_AWAY, Activations, Medium, Offload
from hpczero.plan.peak import Run
from hpczero.plan.plan import Stage

MOST_MICRO_BATCHES = 12  # of one setting: the largest divisors


@dataclass(frozen=True)
class Freedom:
    """What a planner may choose; everything else is as in the run that it starts from.

    Attributes:
        stages: of ZeRO.
        checkpointing: whether activations are checkpointed.
        media: where parts of the shards may rest beside the device.
        host_step: whether the host may step on what rests in its memory.
        fractions: whether only some units may rest elsewhere.
        rests: where inputs of blocks may rest beside the device, with checkpointing; where blocks compute on the host,
            that is not ``host``.
        folder: for ``disk``.
        micro_batches: whether the global batch may be cut otherwise. Sums of other cuts differ in their last bits.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    checkpointing: Sequence[bool] = (False, True)
    media: Sequence[Medium] = ()
    host_step: bool = True
    fractions: bool = True
    rests: Sequence[Medium] = ()
    folder: str | None = None
    micro_batches: bool = True


def candidates(run: Run, freedom: Freedom) -> Iterator[Run]:
    """Every run that ``freedom`` allows with all units on a tier or none, simpler ones first.

    Simpler are fewer tiers, then a lower stage, no checkpointing, larger forwards.

    Args:
        run: as it was asked for; its global batch is kept.
        freedom: what may differ from it.
    """
    for offload, stage, (checkpointing, kept) in product(
        _offloads(run, freedom), freedom.stages, _checkpointings(run, freedom)
    ):
        if offload.any and not _goes(offload, stage):
            continue
        for micro in _micro_batches(run, freedom):
            found = dataclasses.replace(
                run,
                stage=stage,
                offload=offload,
                checkpointing=checkpointing,
                kept=kept,
                micro_batch=micro,
                accumulation=run.micro_batch * run.accumulation // micro,
            )
            if not checkpointing or _saves(found):
                yield found


def tiers(run: Run) -> int:
    """How many of the parts of ``run`` rest elsewhere, inputs of blocks among them."""
    chosen = run.offload
    parts = [chosen.optimizer, chosen.gradients, chosen.parameters]
    inputs = run.checkpointing and run.kept.away
    return sum(part != "device" for part in parts) + inputs


def _checkpointings(run: Run, freedom: Freedom) -> list[tuple[bool, Activations]]:
    """Whether activations are checkpointed, and what is kept of blocks."""
    found = [(checkpointing, run.kept) for checkpointing in freedom.checkpointing]
    if True in freedom.checkpointing:
        block = dataclasses.replace(
            run.kept, checkpointing="block", folder=run.kept.folder or freedom.folder
        )
        found += [(True, dataclasses.replace(block, rest=rest)) for rest in freedom.rests]
    return found


def _saves(run: Run) -> bool:
    """Whether less memory is held with inputs of blocks elsewhere than without."""
    try:
        run.kept.check_saves(inputs=run.network.model.layers, input_nbytes=run.input_nbytes)
    except PlanError:
        return False
    return True


def _offloads(run: Run, freedom: Freedom) -> list[Offload]:
    if run.offload.any:
        return [run.offload]
    based = dataclasses.replace(run.offload, folder=freedom.folder)
    found = [NOTHING_AWAY]
    for medium in freedom.media:
        for many in (1, 2, 3):
            gradients: Medium = medium if many > 1 else "device"
            parameters: Medium = medium if many > 2 else "device"
            away = dataclasses.replace(
                based, optimizer=medium, gradients=gradients, parameters=parameters
            )
            found.append(away)
            # Without its gradients there, the host would wait for them in its step.
            if medium == "host" and many > 1 and freedom.host_step and based.step == "device":
                found.append(dataclasses.replace(away, step="host"))
    return found


def _goes(offload: Offload, stage: int) -> bool:
    """Whether the parts go together: beside those that are tried here, options may ask for more."""
    try:
        offload.check(Stage.of(stage))
    except PlanError:
        return False
    return True


def _micro_batches(run: Run, freedom: Freedom) -> list[int]:
    if not freedom.micro_batches:
        return [run.micro_batch]
    mine = run.micro_batch * run.accumulation
    small = [size for size in range(1, int(mine**0.5) + 1) if mine % size == 0]
    sizes = sorted({*small, *(mine // size for size in small)}, reverse=True)
    return sizes[:MOST_MICRO_BATCHES]
