"""Which of the settings that fit are trained beside the planner's choice.

Owns: the pick. Must not know: how settings are compared or trained. What takes time to train is paid for by what it may
show: a setting that is foretold to take several times as long as the choice is left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import Choice, Foretold, away, kind_of, recomputed

SLOWEST = 2.5  # foretold times of the choice, beyond which nothing is trained


def picked(choice: Choice, many: int, order: random.Random) -> list[PlannedRun]:
    """The choice, its runner-up, the best of each family, then of each kind, and one by chance.

    Args:
        choice: with something that fits.
        many: how many, if so many fit.
        order: for the one by chance.
    """
    assert choice.best is not None, "every setting has candidates that fit"
    near = [found for found in choice.fitting if found.step_s <= SLOWEST * choice.best.step_s]
    found: dict[str, PlannedRun] = {}
    for one in _by_worth(choice, near):
        if len(found) >= max(many - 1, 2):
            break
        found.setdefault(key(one.run), one.run)
    others = [one.run for one in near if key(one.run) not in found]
    for run in order.sample(others, min(max(many - len(found), 0), len(others))):
        found[key(run)] = run
    return list(found.values())


def key(run: PlannedRun) -> str:
    """A candidate in words."""
    words = [f"stage {run.stage}", f"micro-batch {run.micro_batch} x {run.accumulation}"]
    words += [recomputed(run)] if run.checkpointing else []
    words += [away(run)] if run.offload.any else []
    return ", ".join(words)


def _by_worth(choice: Choice, near: list[Foretold]) -> Iterator[Foretold]:
    for best in (choice.best, choice.runner_up):
        if best is not None:
            yield best
    for sort in (_family, lambda run: kind_of(run)):
        seen: set[object] = set()
        for one in near:
            if sort(one.run) not in seen:
                seen.add(sort(one.run))
                yield one


def _family(run: PlannedRun) -> tuple[object, ...]:
    """What kind of memory is saved, and how."""
    fraction = run.offload.fraction if run.offload.any else 0.0
    return fraction > 0, 0 < fraction < 1, run.checkpointing, run.checkpointing and run.kept.away
