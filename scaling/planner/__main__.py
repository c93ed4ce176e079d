"""The planner's choice beside the other settings that fit, trained in turns in one MPI job.

    mpirun -n 2 python -m scaling.planner --folder /local/scratch

In each round every rank probes, every candidate is built, takes a step that does not count, and some that do; then it
is given back. What is predicted comes from the probe of the same round, as a run would predict it at its start. All
settings take some twenty minutes on two cores that nothing else uses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError, run
from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import Choice, Predicted, away, kind_of, recomputed
from scaling.contenders.workload import scratch
from scaling.evidence.harness import Common, Report, at_least, on_ranks, say, seconds
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import table_of

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from scaling.planner.settings import Setting

SLOWEST = 2.5  # predicted times of the choice, beyond which nothing is trained
NEAR_FASTEST, NEAR_SEEN = 0.15, 0.25  # what is asked of a planner


@dataclass(frozen=True)
class Options(Common):
    """What to measure.

    Attributes:
        folder: on the disk; left out, runs/scratch.
        rounds: measured turns of each candidate.
        steps: of a turn, beside one that does not count.
        candidates: settings that are trained for each of what is planned: the choice, its runner-up, others of distinct
            kinds, and one by chance.
        only: numbers of what is planned, from 0; left out, all.
    """

    folder: str | None = None
    rounds: int = 3
    steps: int = 2
    candidates: int = 6
    only: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, rounds=1, steps=1, candidates=2)
        scratch(self.folder)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return on_ranks(Options, "planner", lambda on, _: f"planner-{on.size}", measure, REPORT)


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    from scaling.planner.settings import SETTINGS

    yield run_row(options, "rounds steps", ranks=topology.size)
    folder = scratch(options.folder)
    order = random.Random(options.seed)
    for number in options.only or range(len(SETTINGS)):
        setting = SETTINGS[number]
        yield from _one(topology, setting, folder, options, order)
        say("planner", f"{setting.name} done")


def _one(
    topology: Topology, setting: Setting, folder: Path, options: Options, order: random.Random
) -> Iterator[Row]:
    from scaling.planner.settings import Training

    asked = setting.asked(topology, folder)
    runs: list[PlannedRun] = []
    for turn in range(options.rounds):
        choice = _choice(topology, setting, asked, folder)
        assert choice.best is not None, "every setting has candidates that fit"
        predicted = {key(found.run): found for found in choice.fitting}
        runs = runs or picked(choice, options.candidates, order)
        best = key(choice.best.run)
        second = key(choice.runner_up.run) if choice.runner_up else ""
        now = runs if best in map(key, runs) else [*runs, choice.best.run]
        for candidate in order.sample(now, len(now)):
            training = Training(topology, setting, candidate)
            training.steps(1)
            took = seconds(topology, lambda training=training: training.steps(options.steps))  # type: ignore[misc]
            training.close()
            name = key(candidate)
            step = predicted[name].step
            parts = ("forward", "backward", "communication", "update", "tier")
            yield {
                "kind": "turn",
                "setting": setting.name,
                "round": turn,
                "candidate": name,
                "is_choice": name == best,
                "is_runner_up": name == second,
                "foretold_s": predicted[name].step_s,
                "parts": {part: getattr(step, f"{part}_s") for part in parts},
                "seconds": took / options.steps,
                "fitting": len(choice.fitting),
                "tried": choice.tried,
            }


def _choice(topology: Topology, setting: Setting, asked: PlannedRun, folder: Path) -> Choice:
    """By a probe of now; the same on every rank. Collective."""
    import torch

    from hpczero.accelerator import HostAccelerator
    from hpczero.planner.choice import Freedom, candidates
    from hpczero.planner.search import prediction_on, search
    from hpczero.predict.machine import machine_of
    from hpczero.probe.job import probe_job

    measured, troubles = probe_job(topology, HostAccelerator(), dtype=torch.float32, folder=folder)
    if troubles:
        raise ConfigError("; ".join(troubles))
    machine = machine_of(
        measured, ranks_per_node=topology.local_size, memory_nbytes=1.0, title="this machine"
    )
    freedom = Freedom(media=["disk"], rests=["disk"], folder=str(folder))
    limit = setting.limit(asked, candidates(asked, freedom))
    return search(
        asked, freedom, prediction_on(machine, measured), fits=lambda run: run.most <= limit
    )


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
    for other in order.sample(others, min(max(many - len(found), 0), len(others))):
        found[key(other)] = other
    return list(found.values())


def key(run: PlannedRun) -> str:
    """A candidate in words."""
    words = [f"stage {run.stage}", f"micro-batch {run.micro_batch} x {run.accumulation}"]
    words += [recomputed(run)] if run.checkpointing else []
    words += [away(run)] if run.offload.any else []
    return ", ".join(words)


def _by_worth(choice: Choice, near: list[Predicted]) -> Iterator[Predicted]:
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


@dataclass(frozen=True)
class Verdict:
    """Of one setting."""

    setting: str  # in words
    choice: str  # what the planner chose, at its first probe
    best: str  # the fastest of all that were trained
    slower: float  # seconds of the choice over those of the best
    predicted: float  # seconds that were predicted for the choice over those seen
    tried: int  # how many were trained
    fitting: int  # how many fit


def verdicts(rows: list[Row]) -> list[Verdict]:
    """One of each setting. Times are medians over the rounds; predicted is compared with seen within a round."""
    found = []
    turns = list(of_kind(rows, "turn"))
    for setting in dict.fromkeys(row["setting"] for row in turns):
        mine = [row for row in turns if row["setting"] == setting]
        took: dict[str, list[float]] = {}
        for row in mine:
            took.setdefault(row["candidate"], []).append(row["seconds"])
        seen = {candidate: median(values) for candidate, values in took.items()}
        chosen = [row for row in mine if row["is_choice"]]
        choice = chosen[0]["candidate"]
        best = min(seen, key=lambda candidate: seen[candidate])
        found.append(
            Verdict(
                setting=setting,
                choice=choice,
                best=best,
                slower=max(seen[row["candidate"]] for row in chosen) / seen[best],
                predicted=median(row["foretold_s"] / row["seconds"] for row in chosen),
                tried=len(seen),
                fitting=max(row["fitting"] for row in mine),
            )
        )
    return found


def summary(rows: list[Row]) -> str:
    """How many choices are near the fastest, how many times near those seen; of the choices, and of all."""
    found = verdicts(rows)
    fast = sum(one.slower <= 1 + NEAR_FASTEST for one in found)
    right = sum(abs(one.predicted - 1) <= NEAR_SEEN for one in found)
    ratios = sorted(row["foretold_s"] / row["seconds"] for row in of_kind(rows, "turn"))
    return (
        f"{fast} of {len(found)} choices within {NEAR_FASTEST:.0%} of the fastest that was trained; {right} of "
        f"{len(found)} predicted within {NEAR_SEEN:.0%} of what was seen. Predicted / seen of all {len(ratios)} turns: "
        f"median {median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}."
    )


def text(rows: list[Row]) -> str:
    """Heading, table and summary; markdown."""
    head = head_of(rows)
    shown = table_of(
        verdicts(rows),
        {
            "asked for": lambda found: found.setting,
            "choice": lambda found: found.choice,
            "fastest": lambda found: "the choice" if found.best == found.choice else found.best,
            "choice / fastest": lambda found: f"{found.slower:.2f}",
            "predicted / seen": lambda found: f"{found.predicted:.2f}",
            "trained": lambda found: f"{found.tried} of {found.fitting}",
        },
    )
    title = (
        f"{head['ranks']} rank(s) of one thread, {head['rounds']} rounds of {head['steps']} steps, fp32, fused "
        f"AdamW. {where_and_when(head)}"
    )
    return "\n".join([title, "", shown, "", summary(rows)])


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Choice over fastest, and predicted over seen."""
    found = verdicts(rows)
    panels = {
        "choice / fastest": [Bar(one.setting, one.slower) for one in found],
        "predicted / seen": [Bar(one.setting, one.predicted) for one in found],
    }
    return f"the planner, {head_of(rows)['ranks']} rank(s)", panels


REPORT = Report("Settings that were predicted to be fastest, tried", text, draw)

if __name__ == "__main__":
    run(main)
