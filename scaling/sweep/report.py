"""The report of `scaling.sweep`: its tables and its CSV.

Owns: what is said. Must not know: how it was measured, how numbers are formed (`scaling.sweep.curves`), how they are
drawn.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from scaling.evidence.record import Row, of_kind
from scaling.evidence.resampling import RESAMPLES, Ratio, ratio_of_jobs
from scaling.evidence.spread import CONFIDENCE, Spread
from scaling.evidence.table import table
from scaling.sweep.curves import (
    PARTS,
    Curve,
    Measured,
    busy,
    commits,
    computes_on,
    curves,
    loss_difference,
    parity_groups,
)
from scaling.sweep.study import DEFAULT_STEPS

CHECKPOINT = "checkpoint"
MIB = 2**20
MIXED = "Some curves mix machines or libraries, named with each"
# Nats, of points that train on the same samples. fp32: the order of sums, as in `scaling.peers`. Half precision: each
# rank rounds the gradient of its own samples before it is summed, so other ranks round other numbers; unit roundoff,
# which is 16 times what 38 steps of the workload `tiny` are apart.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2**-8, "fp16": 2**-11}


def text(rows: list[Row]) -> str:
    """Heading, conditions, tables, losses; markdown."""
    parts = [heading(rows), "", *conditions(rows), ""]
    layouts = next(of_kind(rows, "run"))["study"] == "layouts"
    if layouts:
        parts.append(_layouts_table(rows))
    for curve in curves(rows):
        parts += [
            f"**{curve.name}**",
            "",
            *_mixture(curve),
            *([] if layouts else [_scaling_table(curve)]),
            _parts_table(curve),
        ]
        parts.append(_memory_table(curve))
    parts += [*loss_parity(rows), ""]
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head, said = next(of_kind(rows, "run")), label(rows)
    definition = f"Set up like {head['definition'][0].lower()}{head['definition'][1:]}"
    if busy(rows):
        said += "**Busy machine: these times are no result.** "
    base = " N0 is the smallest number of ranks of a curve." * (head["study"] != "layouts")
    return (
        f"{said}{definition if label(rows) else head['definition']}{base} "
        f"{head['points_done']} of {head['points_asked']} points; {head['malformed']} malformed lines skipped. "
        f"{head['steps']} steps of each point after {head['warm_up']} to warm up; commit {commits(rows)}."
    )


def label(rows: list[Row]) -> str:
    """What must stand before any figure of this study."""
    found, said = list(of_kind(rows, "point")), ""
    if any(row["emulated"] for row in found):
        said = "**Emulated nodes on one machine: this is not scaling.** "
    elif any(row["oversubscribed"] for row in found):
        said = "**More ranks than cores: this is not scaling.** "
    if any(curve.mixed for curve in curves(rows)):
        said += f"**{MIXED}: their points are not comparable.** "
    return said


def conditions(rows: list[Row]) -> list[str]:
    """Everything that a reader must know of the measurement, as a list."""
    found = list(of_kind(rows, "point"))
    foreign = [row["foreign_share"] for row in found]
    dates = sorted(row["date"] for row in found)
    machines = max(len(set(row["hosts"])) for row in found)

    def each(say: Callable[[Row], object]) -> str:
        return " | ".join(sorted({str(say(row)) for row in found}))

    def libraries(row: Row) -> str:
        return ", ".join(f"{name} {version}" for name, version in row["versions"].items())

    lines = [
        f"- {each(computes_on)}, {each(lambda row: row['cores'])} cores, "
        f"{each(lambda row: row['threads'])} thread(s) for each rank, {machines} machine(s), "
        f"{each(lambda row: row['memory_gib'])} GiB, Linux {each(lambda row: row['kernel'])}; "
        f"{each(lambda row: row['mpi'])}, Python {each(lambda row: row['python'])}, {each(libraries)}.",
        f"- Placements (nodes x ranks of a node): {', '.join(sorted({row['placement'] for row in found}))}. "
        f"Transport: {each(lambda row: row['transport'])}. {each(lambda row: row['point']['precision'])}.",
        f"- {dates[0]} to {dates[-1]}; commit {commits(rows)}.",
        f"- Other programs took {median(foreign):.1%} of the processors (median point), {max(foreign):.1%} at most.",
        f"- A step takes as long as its slowest rank. One job: median of its steps [{CONFIDENCE:.0%} interval of order "
        f"statistics]; several: median of their medians [{CONFIDENCE:.0%} percentile bootstrap over jobs, then over "
        f"steps, {RESAMPLES} draws]. Speed-up and efficiency: ratio of those medians [{CONFIDENCE:.0%} percentile "
        "bootstrap likewise]. Steps of one job are not independent: its intervals say nothing about other "
        "allocations, for which --jobs repeats a point.",
    ]
    if not bars_are_intervals(rows):
        lines.append(
            f"- (a to b) is no {CONFIDENCE:.0%} interval but a range: six jobs, or six steps where there is one job, "
            "are the fewest that give one."
        )
    few = [row["point"]["steps"] for row in found if row["point"]["steps"] < DEFAULT_STEPS]
    if few:
        lines.append(
            f"- **{len(few)} of {len(found)} jobs have only {each_number(few)} steps; a study wants {DEFAULT_STEPS} "
            "or more.**"
        )
    if machines == 1 and any(row["point"]["ranks"] > 1 for row in found):
        lines.append(
            "- All ranks share one machine's memory, caches and clock: nothing here says how a network scales."
        )
    return lines


def each_number(values: Sequence[int]) -> str:
    """The different ones, in order."""
    return ", ".join(map(str, sorted(set(values))))


def bars_are_intervals(rows: list[Row]) -> bool:
    """Whether everything in brackets, and every bar of a figure, is an interval."""
    return all(measured.step.is_interval for curve in curves(rows) for measured in curve.points)


def _mixture(curve: Curve) -> list[str]:
    """What the points of a curve should have in common and have not."""
    lines = [f"- Mixed {name}: {' | '.join(values)}" for name, values in curve.mixed.items()]
    return [*lines, ""] if lines else []


def _scaling_table(curve: Curve) -> str:
    over = f"over {curve.base_ranks} rank{'s' if curve.base_ranks > 1 else ''}"
    header = ["ranks", "nodes", "step, ms", "predicted, ms", f"speed-up {over}"]
    header += [f"efficiency {over}", "GFLOP/s/rank"]
    cells = []
    for measured in curve.points:
        base = measured is curve.base
        ups, efficiency = curve.speed_up(measured), curve.efficiency(measured)
        cells.append(
            [
                str(measured.point.ranks),
                str(measured.point.nodes),
                _with_spread(measured.step),
                "–" if measured.predicted_ms is None else f"{measured.predicted_ms:.1f}",
                "1" if base else _with_ratio(ups),
                "1" if base else _with_ratio(efficiency),
                f"{measured.tflops * 1e3:,.4g}",
            ]
        )
    return table(header, cells)


def _layouts_table(rows: list[Row]) -> str:
    """All layouts, in the order in which they were asked for; each over the first one with the same samples."""
    order = {json.dumps(row["point"], sort_keys=True): n for n, row in enumerate(rows[1:])}
    found = [curve.base for curve in curves(rows)]
    found.sort(key=lambda one: order[json.dumps(one.rows[0]["point"], sort_keys=True)])
    cells = []
    for one in found:
        point = one.point
        alike = (point.model, point.stage, point.global_batch, point.nodes)
        first = next(
            other
            for other in found
            if alike
            == (other.point.model, other.point.stage, other.point.global_batch, other.point.nodes)
        )
        times = point.batch // point.micro_batch
        cells.append(
            [
                f"{point.model}, stage {point.stage}{point.shared or ', plain'}",
                str(point.nodes),
                f"{point.data} x {point.micro_batch} x {times}",
                _with_spread(one.step),
                "1" if one is first else _with_ratio(ratio_of_jobs(one.jobs_ms, first.jobs_ms)),
                f"{one.worst('ledger_nbytes') / MIB:,.1f}",
            ]
        )
    header = ["layout", "nodes", "data ranks x micro-batch x times", "step, ms", "over the first"]
    return table([*header, "ledger, MiB"], cells)


def _parts_table(curve: Curve) -> str:
    header = ["ranks", *(f"{part}, ms" for part in (*PARTS, CHECKPOINT)), "exposed communication"]
    cells = []
    for measured in curve.points:
        parts = {part: measured.part_ms(part) for part in (*PARTS, CHECKPOINT)}
        step_ms = math.fsum(parts[part] for part in PARTS)
        cells.append(
            [
                str(measured.point.ranks),
                *(f"{ms:.2f}" for ms in parts.values()),
                f"{parts['communication'] / step_ms:.1%}",
            ]
        )
    return table(header, cells)


def _memory_table(curve: Curve) -> str:
    header = ["ranks", "planned, MiB", "ledger, MiB", "ledger / planned", "PSS over the start, MiB"]
    on_device = any(m.worst("device_peak_nbytes") for m in curve.points)
    header += ["peak on the device, MiB"] if on_device else []
    cells = [
        [
            str(m.point.ranks),
            f"{m.planned_nbytes / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / m.planned_nbytes:.3f}",
            f"{m.pss_nbytes / MIB:,.1f}",
            *([f"{m.worst('device_peak_nbytes') / MIB:,.1f}"] if on_device else []),
        ]
        for m in curve.points
    ]
    return table(header, cells)


def loss_parity(rows: list[Row]) -> list[str]:
    """A line for each group: how far losses are apart, whatever the stage and the ranks."""
    lines = []
    for name, members in parity_groups(rows).items():
        if len(members) < 2:
            continue
        worst = max(max(loss_difference(row, members[0])) for row in members[1:])
        tolerance = LOSS_TOLERANCES[members[0]["point"]["precision"]]
        verdict = "equal" if worst <= tolerance else "**NOT equal: they do not train the same**"
        lines.append(
            f"- Losses of {name}: {len(members)} points, at most {worst:.1e} apart over "
            f"{min(len(row['losses']) for row in members)} steps: {verdict} (tolerance {tolerance:g})."
        )
    return lines or [
        "- Losses: no two points train on the same samples, so there is nothing to compare."
    ]


def as_csv(rows: list[Row]) -> str:
    """One line for each point, numbers only, in the units of the column names."""
    head = next(of_kind(rows, "run"))
    out = io.StringIO()
    names = [
        "study",
        "curve",
        "model",
        "stage",
        "ranks",
        "nodes",
        "batch_per_rank",
        "global_batch",
        "jobs",
        "steps",
        "base_ranks",
        "computes_on",
        "mpi",
        "torch",
    ]
    names += ["emulated", "oversubscribed", "step_ms", "step_ms_low", "step_ms_high"]
    names.append("predicted_ms")
    names += [
        "speed_up",
        "speed_up_low",
        "speed_up_high",
        "efficiency",
        "efficiency_low",
        "efficiency_high",
    ]
    names += ["tflops_per_rank", *(f"{part}_ms" for part in (*PARTS, CHECKPOINT))]
    names += ["planned_nbytes", "ledger_nbytes", "pss_over_start_nbytes", "commit", "is_interval"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for curve in curves(rows):
        for m in curve.points:
            ups, efficiency, point = curve.speed_up(m), curve.efficiency(m), m.point
            writer.writerow(
                [
                    head["study"],
                    curve.name,
                    point.model,
                    point.stage,
                    point.ranks,
                    point.nodes,
                    point.batch,
                    point.global_batch,
                    len(m.rows),
                    m.step.count,
                    curve.base_ranks,
                    _each(m, computes_on),
                    _each(m, lambda row: row["mpi"]),
                    _each(m, lambda row: row["versions"].get("torch", "")),
                    m.rows[0]["emulated"],
                    m.rows[0]["oversubscribed"],
                    *(f"{v:.4f}" for v in (m.step.median, m.step.low, m.step.high)),
                    "" if m.predicted_ms is None else f"{m.predicted_ms:.4f}",
                    *(f"{v:.4f}" for v in (ups.value, ups.low, ups.high)),
                    *(f"{v:.4f}" for v in (efficiency.value, efficiency.low, efficiency.high)),
                    f"{m.tflops:.6f}",
                    *(f"{m.part_ms(part):.4f}" for part in (*PARTS, CHECKPOINT)),
                    m.planned_nbytes,
                    int(m.worst("ledger_nbytes")),
                    int(m.pss_nbytes),
                    _each(m, lambda row: row["commit"]),
                    m.step.is_interval,
                ]
            )
    return out.getvalue()


def _each(measured: Measured, say: Callable[[Row], str]) -> str:
    """Of all jobs of a point, each value once."""
    return " | ".join(sorted({say(row) for row in measured.rows}))


def write_tables(rows: list[Row], path: Path, said: str) -> None:
    """``.csv`` and ``.md`` beside ``path``; ``said`` is the text."""
    path.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{said}\n", encoding="utf-8")


def _with_spread(spread: Spread) -> str:
    return _surrounded(spread.median, spread.low, spread.high, 1, spread.is_interval)


def _with_ratio(ratio: Ratio) -> str:
    return _surrounded(ratio.value, ratio.low, ratio.high, 2, ratio.is_interval)


def _surrounded(value: float, low: float, high: float, digits: int, is_interval: bool) -> str:
    """``value [low, high]`` for an interval, ``value (low to high)`` for a range that is none."""
    middle, left, right = (f"{x:.{digits}f}" for x in (value, low, high))
    return f"{middle} [{left}, {right}]" if is_interval else f"{middle} ({left} to {right})"
