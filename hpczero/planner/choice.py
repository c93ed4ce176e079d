"""The choice: of all settings that fit, the one that is predicted to take least time for a step.

The same inputs give the same answer on every rank; who measures must hand every rank the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from hpczero.errors import PlanError
from hpczero.plan.degrees import divisors
from hpczero.plan.offload import MIB, NOTHING_AWAY, Activations, Medium, Offload
from hpczero.plan.peak import PlannedRun
from hpczero.plan.plan import Stage
from hpczero.predict.answer import seconds
from hpczero.predict.model import Prediction

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


def candidates(run: PlannedRun, freedom: Freedom) -> Iterator[PlannedRun]:
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


def tiers(run: PlannedRun) -> int:
    """How many of the parts of ``run`` rest elsewhere, inputs of blocks among them."""
    inputs = run.checkpointing and run.kept.away
    return len(run.offload.typed) + inputs


def _checkpointings(run: PlannedRun, freedom: Freedom) -> list[tuple[bool, Activations]]:
    """Whether activations are checkpointed, and what is kept of blocks."""
    found = [(checkpointing, run.kept) for checkpointing in freedom.checkpointing]
    if True in freedom.checkpointing:
        block = dataclasses.replace(
            run.kept, checkpointing="block", folder=run.kept.folder or freedom.folder
        )
        found += [(True, dataclasses.replace(block, rest=rest)) for rest in freedom.rests]
    return found


def _saves(run: PlannedRun) -> bool:
    """Whether less memory is held with inputs of blocks elsewhere than without."""
    with suppress(PlanError):
        run.kept.check_saves(inputs=run.model.layers, input_nbytes=run.input_nbytes)
        return True
    return False


def _offloads(run: PlannedRun, freedom: Freedom) -> list[Offload]:
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
    with suppress(PlanError):
        offload.check(Stage.of(stage))
        return True
    return False


def _micro_batches(run: PlannedRun, freedom: Freedom) -> list[int]:
    if not freedom.micro_batches:
        return [run.micro_batch]
    return divisors(run.micro_batch * run.accumulation)[: -MOST_MICRO_BATCHES - 1 : -1]


Found = TypeVar("Found")
ALIKE = 0.01  # of a step: settings closer than that are told apart by their simplicity


@dataclass(frozen=True)
class Predicted:
    """A run and its step.

    Attributes:
        run: the settings.
        step: seconds of its parts.
    """

    run: PlannedRun
    step: Prediction

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.step.step_s

    @property
    def longest(self) -> tuple[str, float]:
        """The part of the step that takes longest, and its seconds."""
        step = self.step
        parts = {
            "forward and backward": step.forward_s + step.backward_s,
            "communication": step.communication_s,
            "waiting for the memory tier": step.tier_s,
            "the optimizer's step": step.update_s,
        }
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name]


@dataclass(frozen=True)
class Choice:
    """What a planner has found.

    Attributes:
        fitting: settings that fit, best first.
        too_large: of those that do not fit, the one that would be fastest if it did; None if all fit.
        tried: how many settings were looked at.
    """

    fitting: tuple[Predicted, ...]
    too_large: Predicted | None
    tried: int

    @property
    def best(self) -> Predicted | None:
        """What to take; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> Predicted | None:
        """The next best that differs in more than its micro-batch and its fraction; None if there is none."""
        if not self.fitting:
            return None
        kind = kind_of(self.fitting[0].run)
        return next((other for other in self.fitting if kind_of(other.run) != kind), None)


def choose(
    runs: Iterable[PlannedRun],
    fits: Callable[[PlannedRun], bool],
    prediction_of: Callable[[PlannedRun], Prediction],
) -> Choice:
    """Order ``runs``. Not collective.

    Args:
        runs: all settings, simpler ones first.
        fits: whether a run fits the memory.
        prediction_of: its step.
    """
    fitting: list[Predicted] = []
    too_large: list[Predicted] = []
    for run in runs:
        (fitting if fits(run) else too_large).append(Predicted(run, prediction_of(run)))
    fitting = in_order(fitting, lambda found: found.step_s, lambda found: _simplicity(found.run))
    return Choice(
        tuple(fitting),
        min(too_large, key=lambda found: found.step_s, default=None),
        len(fitting) + len(too_large),
    )


def in_order(
    found: Iterable[Found],
    step_s: Callable[[Found], float],
    simplicity: Callable[[Found], tuple[float, ...]],
) -> list[Found]:
    """The fastest first; before it, of those that are as fast within one percent, the simplest."""
    ordered = sorted(found, key=step_s)  # stable: simpler first
    if ordered:
        within = step_s(ordered[0]) * (1 + ALIKE)
        simplest = min((one for one in ordered if step_s(one) <= within), key=simplicity)
        ordered.remove(simplest)
        ordered.insert(0, simplest)
    return ordered


def _simplicity(run: PlannedRun) -> tuple[float, ...]:
    host = run.offload.on_host
    away = run.offload.fraction if run.offload.any else 0.0
    return tiers(run), host, run.checkpointing, run.accumulation, run.stage, away


def kind_of(run: PlannedRun) -> tuple[object, ...]:
    """What tells settings apart beside their micro-batch, and the part of the model that this leaves room for."""
    whole = dataclasses.replace(run.offload, fraction=float(run.offload.fraction > 0))
    return run.stage, whole, run.checkpointing, run.kept


def options_of(run: PlannedRun) -> list[str]:
    """The settings as options of ``hpczero.train``, each as it is typed."""
    offload = run.offload
    typed = [f"--parallel.reduce {run.reduce}"] if run.reduce != "fp32" else []
    typed += [
        f"--parallel.stage {run.stage}",
        f"--train.micro_batch {run.micro_batch}",
        f"--train.accumulation {run.accumulation}",
        f"--model.checkpoint_activations {str(run.checkpointing).lower()}",
    ]
    typed += offload.typed
    if offload.medium == "disk":
        typed.append(f"--offload.folder {offload.folder}")
    typed += _beside_parts(offload)
    if run.checkpointing and run.kept.away:
        typed.append(f"--activations.rest {run.kept.rest}")
        if run.kept.rest == "disk":
            typed.append(f"--activations.folder {run.kept.folder}")
    return typed


def _beside_parts(offload: Offload) -> list[str]:
    """What else is in force of a tier, chosen or given."""
    if not offload.any:
        return []
    names = ("fraction", "step", "delayed", "buffers", "ahead")
    given = [(name, getattr(offload, name), getattr(NOTHING_AWAY, name)) for name in names]
    given.append(("window", offload.window // MIB, NOTHING_AWAY.window // MIB))
    return [
        f"--offload.{name} {str(value).lower()}" for name, value, usual in given if value != usual
    ]


def describe(found: Predicted) -> str:
    """One line: settings, seconds, bytes."""
    run = found.run
    words = [f"stage {run.stage}"]
    words += [away(run)] if run.offload.any else []
    words += [recomputed(run)] if run.checkpointing else []
    times = f" x {run.accumulation}" if run.accumulation > 1 else ""
    words.append(f"micro-batch {run.micro_batch}{times}")
    resting = [
        f"{nbytes(run.resting(medium))} on {medium}"
        for medium in ("host", "disk")
        if run.resting(medium)
    ]
    held = " and ".join([f"up to {nbytes(run.most - run.tiered)} a rank", *resting])
    return f"{', '.join(words)}: {seconds(found.step_s)} a step, {held}"


def away(run: PlannedRun) -> str:
    """What rests elsewhere, such as ``optimizer and gradients of 3 of 9 units on disk``."""
    *most, last = [name for name, medium in run.offload.parts.items() if medium != "device"]
    said = f"{', '.join(most)} and {last}" if most else last
    some = ""
    if run.offload.fraction < 1:
        some = f" of {len(run.offloaded.away)} of {len(run.plan.trainable_units)} units"
    stepped = ", stepped on by the host" if run.offload.on_host else ""
    return f"{said}{some} on {run.offload.medium}{stepped}"


def recomputed(run: PlannedRun) -> str:
    """That activations are checkpointed, and where inputs of blocks rest."""
    where = f" with inputs on {run.kept.rest}" if run.kept.away else ""
    return f"activations checkpointed{where}"


def lines(choice: Choice) -> list[str]:
    """The choice, the runner-up, what binds, and the options that pin the choice; of a choice that has a best."""
    best, other, large = choice.best, choice.runner_up, choice.too_large
    assert best is not None, "nothing to describe"
    part, took = best.longest
    said = [f"chosen of {choice.tried} settings: {describe(best)}"]
    if other is not None:
        said.append(f"runner-up: {describe(other)}")
    said.append(f"what binds: {part}, {seconds(took)} of it")
    if large is not None and large.step_s < best.step_s:
        said[-1] += f"; and memory: {describe(large)} would be faster and does not fit"
    said.append(f"to pin it: {' '.join(options_of(best.run))}")
    return said


def nbytes(value: float) -> str:
    """As a user reads them."""
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
