"""Prediction against measurement on this host: the same rounds, the same processes.

All crews of a workload stay resident; in each round every crew first probes the host with all its ranks, then trains a
few steps, so that what slows the machine down for a while slows both down. Ratios are formed within a turn.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence

from hpczero.predict.machine import MeasuredKernels
from scaling.contenders import find_entry
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS
from scaling.evidence.harness import Report, in_turns, say
from scaling.evidence.host import BUSY_SHARE, machine_seconds, process_seconds
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, circumstances, cores, head_of, of_kind
from scaling.evidence.spread import Spread, table_of, with_spread
from scaling.predict.host import predict_on_host

TOLERANCE = 0.20
WARM_UP = 2

Point = tuple[str, int, int]  # workload, ranks, stage


def measure(
    workloads: Sequence[str],
    ranks: Sequence[int],
    stages: Sequence[int],
    *,
    rounds: int,
    steps: int,
) -> Iterator[Row]:
    """All rows: ``rounds`` turns of ``steps`` steps for each workload on each number of ranks at each stage."""
    head = {"rounds": rounds, "steps": steps, "tolerance": TOLERANCE}
    yield {"kind": "run", **circumstances(), **head}
    order = random.Random(0)
    for name in workloads:
        with contextlib.ExitStack() as stack:
            crews = {}
            for size in ranks:
                for stage in stages:
                    entry = find_entry(f"hpczero-{stage}", transport="auto")
                    crew = stack.enter_context(Crew(entry, WORKLOADS[name], size=size))
                    crews[name, size, stage] = crew
                    crew.ask("build")
                    crew.ask("turn", steps=WARM_UP)
            say("predict", name)
            for number, turn in in_turns([*crews], rounds, order, program="predict"):
                for point in turn:
                    row = take_turn(crews[point], point, steps)
                    yield {"kind": "turn", "workload": name, "round": number, **row}


def take_turn(crew: Crew, point: Point, steps: int) -> Row:
    """Probe, predict, train."""
    name, ranks, stage = point
    begin, own, busy = time.perf_counter(), process_seconds(crew.pids), machine_seconds()
    probes = [crew.ask("probe")]
    answers = crew.ask("turn", steps=steps)
    probes.append(crew.ask("probe"))
    own, busy = process_seconds(crew.pids) - own, machine_seconds() - busy
    window_s = time.perf_counter() - begin
    # Before and after the steps: what changed meanwhile counts half.
    measured = MeasuredKernels.of_ranks([rank for probe in probes for rank in probe])
    model, micro_batch = WORKLOADS[name].model, WORKLOADS[name].sequences
    found = predict_on_host(model, measured, ranks=ranks, stage=stage, micro_batch=micro_batch)
    parts = ("forward", "backward", "communication", "update")
    return {
        "ranks": ranks,
        "stage": stage,
        "measured_s": max(answer["seconds"] for answer in answers) / steps,
        "predicted_s": found.step_s,
        "parts_s": {part: getattr(found, f"{part}_s") for part in parts},
        "matmul_flops": dict(measured.products),
        "foreign_share": max(busy - own, 0.0) / (window_s * cores()),
    }


def probe_host(ranks: int) -> MeasuredKernels:
    """What so many ranks measure together, in a job of their own."""
    entry = find_entry("hpczero-0", transport="auto")
    with Crew(entry, WORKLOADS["tiny"], size=ranks) as crew:
        crew.ask("build")  # the heap as in training
        crew.ask("turn", steps=1)
        return MeasuredKernels.of_ranks(crew.ask("probe"))


def points(rows: list[Row]) -> dict[Point, list[Row]]:
    """Turns of each point: the quiet ones, or all where none was quiet."""
    found: dict[Point, list[Row]] = {}
    for row in of_kind(rows, "turn"):
        found.setdefault((row["workload"], row["ranks"], row["stage"]), []).append(row)
    return {key: _quiet(turns) or turns for key, turns in sorted(found.items())}


def _quiet(turns: Sequence[Row]) -> list[Row]:
    """Those during which, probes included, other programs hardly worked; else probe and steps see other machines."""
    return [turn for turn in turns if turn["foreign_share"] <= BUSY_SHARE]


def ratio(turns: Sequence[Row]) -> Spread:
    """Predicted over measured, within turns."""
    return Spread.of(turn["predicted_s"] / turn["measured_s"] for turn in turns)


def is_near(turns: Sequence[Row], tolerance: float = TOLERANCE) -> bool:
    """Whether the prediction is as near to the measurement as is asked for."""
    return abs(ratio(turns).median - 1) <= tolerance


def text(rows: list[Row]) -> str:
    """Heading, table, verdict; markdown."""
    head, found = head_of(rows), points(rows)
    tolerance = head["tolerance"]

    def ms(point: Point, name: str) -> str:
        return with_spread(Spread.of(turn[name] for turn in found[point]), 0, 1e3)

    shown = table_of(
        found,
        {
            "workload": lambda point: point[0],
            "ranks": lambda point: str(point[1]),
            "stage": lambda point: str(point[2]),
            "measured, ms": lambda point: ms(point, "measured_s"),
            "predicted, ms": lambda point: ms(point, "predicted_s"),
            "predicted / measured": lambda point: with_spread(ratio(found[point]), 2),
            f"within {tolerance:.0%}": lambda point: (
                "yes" if is_near(found[point], tolerance) else "**no**"
            ),
            "turns": lambda point: str(len(found[point])),
            "foreign CPU at most": lambda point: (
                f"{max(turn['foreign_share'] for turn in found[point]):.0%}"
            ),
        },
    )
    near = sum(is_near(turns, tolerance) for turns in found.values())
    quiet = [len(_quiet(turns)) for turns in found.values()]
    lines = [
        f"Prediction against measurement on this host: {head['cores']} cores of {head['cpu']}, commit "
        f"{head['commit']}, {head['date']}. {head['rounds']} turns of {head['steps']} steps; the host is probed by "
        "the same ranks before and after each turn. Median [95 % interval, or smallest and largest below 6 turns].",
        "",
        shown,
        f"{near} of {len(found)} points within {tolerance:.0%}. {sum(quiet)} of "
        f"{len(list(of_kind(rows, 'turn')))} turns were quiet: other programs took at most {BUSY_SHARE:.0%} of the "
        "processors from the first probe to the last. Where a point has quiet turns, only they are used.",
    ]
    if busy := quiet.count(0):
        lines.append(
            f"**Busy machine: {busy} points had no quiet turn, their lines are no result.**"
        )
    return "\n".join(lines)


def _bars(rows: list[Row]) -> tuple[str, Panels]:
    """Ratios as bars."""
    bars = [
        Bar.of(f"{workload}, {ranks} rank(s), stage {stage}", ratio(turns))
        for (workload, ranks, stage), turns in points(rows).items()
    ]
    axis = "predicted / measured step time (band: within 20 %)"
    return "prediction against measurement", {axis: bars}


draw = as_bars(_bars, wanted=(0.8, 1.0, 1.2))
REPORT = Report("Steps of published runs, predicted", text, draw)
