"""The report of `scaling.sweep`: its tables and its CSV, from the numbers of `scaling.sweep.curves`."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median

from scaling.evidence.host import BUSY_SHARE
from scaling.evidence.record import Row, head_of, of_kind
from scaling.evidence.spread import CONFIDENCE, Spread, table_of, with_spread
from scaling.sweep.curves import RESAMPLES, Curve, Measured, computes_on, curves, ratio_of_jobs
from scaling.sweep.study import ALL_PARTS, DEFAULT_STEPS, PARTS, Point

MIB = 2**20
MIXED = "Some curves mix machines or libraries, named with each"
# Nats, of points that train on the same samples. fp32: the order of sums, as in `scaling.peers`. Half precision: each
# rank rounds the gradient of its own samples before it is summed, so other ranks round other numbers; unit roundoff,
# which is 16 times what 38 steps of the workload `tiny` are apart.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2**-8, "fp16": 2**-11}


def text(rows: list[Row]) -> str:
    """Heading, conditions, tables, losses; markdown."""
    parts = [heading(rows), "", *conditions(rows), ""]
    layouts = head_of(rows)["study"] == "layouts"
    if layouts:
        parts.append(_layouts_table(rows))
    for curve in curves(rows):
        parts += [
            f"**{curve.name}**",
            "",
            *(f"- Mixed {name}: {' | '.join(values)}" for name, values in curve.mixed.items()),
            *([""] if curve.mixed else []),
            *([] if layouts else [_scaling_table(curve)]),
            _parts_table(curve),
        ]
        parts.append(_memory_table(curve))
    parts += [*loss_parity(rows), ""]
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head, said = head_of(rows), label(rows)
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


def commits(rows: list[Row]) -> str:
    """Of the points, each once."""
    return ", ".join(sorted({row["commit"] for row in of_kind(rows, "point")}))


def busy(rows: list[Row]) -> bool:
    """Whether other programs took so much of the processors that times say little."""
    return median(row["foreign_share"] for row in of_kind(rows, "point")) > BUSY_SHARE


def parity_groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Points that must have the same losses: same model, same samples in every step."""
    groups: dict[str, list[Row]] = {}
    for row in of_kind(rows, "point"):
        point = Point.of_json(row["point"])
        name = f"{point.model}, global batch {point.global_batch}, {point.precision}"
        groups.setdefault(name, []).append(row)
    return groups


def loss_difference(row: Row, reference: Row) -> list[float]:
    """Absolute difference of the losses of each step that both have."""
    return [abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=False)]


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
        numbers = ", ".join(map(str, sorted(set(few))))
        lines.append(
            f"- **{len(few)} of {len(found)} jobs have only {numbers} steps; a study wants {DEFAULT_STEPS} "
            "or more.**"
        )
    if machines == 1 and any(row["point"]["ranks"] > 1 for row in found):
        lines.append(
            "- All ranks share one machine's memory, caches and clock: nothing here says how a network scales."
        )
    return lines


def bars_are_intervals(rows: list[Row]) -> bool:
    """Whether everything in brackets, and every bar of a figure, is an interval."""
    return all(measured.step.is_interval for curve in curves(rows) for measured in curve.points)


def _scaling_table(curve: Curve) -> str:
    over = f"over {curve.base_ranks} rank{'s' if curve.base_ranks > 1 else ''}"

    def ratio(of: Callable[[Measured], Spread]) -> Callable[[Measured], str]:
        return lambda m: "1" if m is curve.base else _shown(of(m), 2)

    return table_of(
        curve.points,
        {
            "ranks": lambda m: str(m.point.ranks),
            "nodes": lambda m: str(m.point.nodes),
            "step, ms": lambda m: _shown(m.step, 1),
            "predicted, ms": lambda m: "–" if m.predicted_ms is None else f"{m.predicted_ms:.1f}",
            f"speed-up {over}": ratio(curve.speed_up),
            f"efficiency {over}": ratio(curve.efficiency),
            "GFLOP/s/rank": lambda m: f"{m.tflops * 1e3:,.4g}",
        },
    )


def _layouts_table(rows: list[Row]) -> str:
    """All layouts, in the order in which they were asked for; each over the first one with the same samples."""
    order = {json.dumps(row["point"], sort_keys=True): n for n, row in enumerate(rows[1:])}
    found = [curve.base for curve in curves(rows)]
    found.sort(key=lambda one: order[json.dumps(one.rows[0]["point"], sort_keys=True)])

    def alike(one: Measured) -> tuple[object, ...]:
        return one.point.model, one.point.stage, one.point.global_batch, one.point.nodes

    def over_first(one: Measured) -> str:
        first = next(other for other in found if alike(other) == alike(one))
        return "1" if one is first else _shown(ratio_of_jobs(one.jobs_ms, first.jobs_ms), 2)

    def spread_over(point: Point) -> str:
        return f"{point.data} x {point.micro_batch} x {point.batch // point.micro_batch}"

    return table_of(
        found,
        {
            "layout": lambda one: (
                f"{one.point.model}, stage {one.point.stage}{one.point.shared or ', plain'}"
            ),
            "nodes": lambda one: str(one.point.nodes),
            "data ranks x micro-batch x times": lambda one: spread_over(one.point),
            "step, ms": lambda one: _shown(one.step, 1),
            "over the first": over_first,
            "ledger, MiB": lambda one: f"{one.worst('ledger_nbytes') / MIB:,.1f}",
        },
    )


def _parts_table(curve: Curve) -> str:
    def ms(part: str) -> Callable[[Measured], str]:
        return lambda m: f"{m.part_ms(part):.2f}"

    def exposed(m: Measured) -> str:
        share = m.part_ms("communication") / math.fsum(m.part_ms(part) for part in PARTS)
        return f"{share:.1%}"

    return table_of(
        curve.points,
        {
            "ranks": lambda m: str(m.point.ranks),
            **{f"{part}, ms": ms(part) for part in ALL_PARTS},
            "exposed communication": exposed,
        },
    )


def _memory_table(curve: Curve) -> str:
    columns: dict[str, Callable[[Measured], str]] = {
        "ranks": lambda m: str(m.point.ranks),
        "planned, MiB": lambda m: f"{m.planned_nbytes / MIB:,.1f}",
        "ledger, MiB": lambda m: f"{m.worst('ledger_nbytes') / MIB:,.1f}",
        "ledger / planned": lambda m: f"{m.worst('ledger_nbytes') / m.planned_nbytes:.3f}",
        "PSS over the start, MiB": lambda m: f"{m.pss_nbytes / MIB:,.1f}",
    }
    if any(m.worst("device_peak_nbytes") for m in curve.points):
        columns["peak on the device, MiB"] = lambda m: f"{m.worst('device_peak_nbytes') / MIB:,.1f}"
    return table_of(curve.points, columns)


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
    out = io.StringIO()
    study = head_of(rows)["study"]
    found = [_numbers(curve, m) for curve in curves(rows) for m in curve.points]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["study", *found[0]])
    writer.writerows([study, *numbers.values()] for numbers in found)
    return out.getvalue()


def _numbers(curve: Curve, m: Measured) -> dict[str, object]:
    """Of one point, by the name of the column."""
    point = m.point

    def three(name: str, of: Spread) -> dict[str, str]:
        ends = {"": of.median, "_low": of.low, "_high": of.high}
        return {f"{name}{end}": f"{number:.4f}" for end, number in ends.items()}

    return {
        "curve": curve.name,
        **{name: getattr(point, name) for name in ("model", "stage", "ranks", "nodes")},
        "batch_per_rank": point.batch,
        "global_batch": point.global_batch,
        "jobs": len(m.rows),
        "steps": m.step.count,
        "base_ranks": curve.base_ranks,
        "computes_on": _each(m, computes_on),
        "mpi": _each(m, lambda row: row["mpi"]),
        "torch": _each(m, lambda row: row["versions"].get("torch", "")),
        "emulated": m.rows[0]["emulated"],
        "oversubscribed": m.rows[0]["oversubscribed"],
        **three("step_ms", m.step),
        "predicted_ms": "" if m.predicted_ms is None else f"{m.predicted_ms:.4f}",
        **three("speed_up", curve.speed_up(m)),
        **three("efficiency", curve.efficiency(m)),
        "tflops_per_rank": f"{m.tflops:.6f}",
        **{f"{part}_ms": f"{m.part_ms(part):.4f}" for part in ALL_PARTS},
        "planned_nbytes": m.planned_nbytes,
        "ledger_nbytes": int(m.worst("ledger_nbytes")),
        "pss_over_start_nbytes": int(m.pss_nbytes),
        "commit": _each(m, lambda row: row["commit"]),
        "is_interval": m.step.is_interval,
    }


def _each(measured: Measured, say: Callable[[Row], str]) -> str:
    """Of all jobs of a point, each value once."""
    return " | ".join(sorted({say(row) for row in measured.rows}))


def write_tables(rows: list[Row], path: Path, said: str) -> None:
    """``.csv`` and ``.md`` beside ``path``; ``said`` is the text."""
    path.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{said}\n", encoding="utf-8")


def _shown(spread: Spread, digits: int) -> str:
    """``value [low, high]`` for an interval, ``value (low to high)`` for a range that is none."""
    if spread.is_interval:
        return with_spread(spread, digits)
    middle, low, high = (f"{x:.{digits}f}" for x in (spread.median, spread.low, spread.high))
    return f"{middle} ({low} to {high})"
