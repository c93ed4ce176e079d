"""The choice: of all settings that fit, the one that is foretold to take least time for a step.

Owns: the order of settings, and what binds. Must not know: how bytes or seconds are counted, words, torch, MPI.
The same inputs give the same answer on every rank; who measures must hand every rank the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpczero.plan.peak import Run
from hpczero.planner.candidates import tiers
from hpczero.predict.model import Prediction

ALIKE = 0.01  # of a step: settings closer than that are told apart by their simplicity


@dataclass(frozen=True)
class Foretold:
    """A run and its step.

    Attributes:
        run: the settings.
        step: seconds of its parts.
    """

    run: Run
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

    fitting: tuple[Foretold, ...]
    too_large: Foretold | None
    tried: int

    @property
    def best(self) -> Foretold | None:
        """What to take; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> Foretold | None:
        """The next best that differs in more than its micro-batch and its fraction; None if there is none."""
        if not self.fitting:
            return None
        kind = kind_of(self.fitting[0].run)
        return next((other for other in self.fitting if kind_of(other.run) != kind), None)


def choose(
    runs: Iterable[Run], fits: Callable[[Run], bool], foretell: Callable[[Run], Prediction]
) -> Choice:
    """Order ``runs``. Not collective.

    Args:
        runs: all settings, simpler ones first.
        fits: whether a run fits the memory.
        foretell: its step.
    """
    fitting: list[Foretold] = []
    too_large: list[Foretold] = []
    for run in runs:
        (fitting if fits(run) else too_large).append(Foretold(run, foretell(run)))
    fitting.sort(key=lambda found: found.step_s)  # stable: simpler first
    if fitting:
        within = fitting[0].step_s * (1 + ALIKE)
        alike = [found for found in fitting if found.step_s <= within]
        simplest = min(alike, key=lambda found: _simplicity(found.run))
        fitting.remove(simplest)
        fitting.insert(0, simplest)
    return Choice(
        tuple(fitting),
        min(too_large, key=lambda found: found.step_s, default=None),
        len(fitting) + len(too_large),
    )


def _simplicity(run: Run) -> tuple[float, ...]:
    host = run.offload.on_host
    away = run.offload.fraction if run.offload.any else 0.0
    return tiers(run), host, run.checkpointing, run.accumulation, run.stage, away


def kind_of(run: Run) -> tuple[object, ...]:
    """What tells settings apart beside their micro-batch, and the part of the model that this leaves room for."""
    whole = dataclasses.replace(run.offload, fraction=float(run.offload.fraction > 0))
    return run.stage, whole, run.checkpointing, run.kept
