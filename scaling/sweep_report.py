"""The report of `scaling.sweep`: its tables and its CSV.

Owns: what is said. Must not know: how it was measured, how numbers are formed (`scaling.curves`), how they are drawn.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from statistics import median

from scaling.curves import (
    PARTS,
    RESAMPLES,
    Curve,
    Ratio,
    busy,
    curves,
    loss_difference,
    parity_groups,
)
from scaling.record import Row, of_kind
from scaling.spread import CONFIDENCE
from scaling.table import table, with_spread

CHECKPOINT = "checkpoint"
MIB = 2**20
LOSS_TOLERANCE = 1e-4  # order of fp32 sums, as in `scaling.peers`


def text(rows: list[Row]) -> str:
    """Heading, conditions, tables, losses; markdown."""
    parts = [heading(rows), "", *conditions(rows), ""]
    for curve in curves(rows):
        parts += [f"**{curve.name}**", "", _scaling_table(curve), _parts_table(curve)]
        parts.append(_memory_table(curve))
    parts += [*loss_parity(rows), ""]
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head, said = next(of_kind(rows, "run")), label(rows)
    definition = f"Set up like {head['definition'][0].lower()}{head['definition'][1:]}"
    if busy(rows):
        said += "**Busy machine: these times are no result.** "
    return (
        f"{said}{definition if label(rows) else head['definition']} N0 is the smallest number of ranks of a curve. "
        f"{head['points_done']} of {head['points_asked']} points; {head['malformed']} malformed lines skipped. "
        f"{head['steps']} steps of each point after {head['warm_up']} to warm up; commit {head['asked_at']}."
    )


def label(rows: list[Row]) -> str:
    """What must stand before any figure of this study."""
    found = list(of_kind(rows, "point"))
    if any(row["emulated"] for row in found):
        return "**Emulated nodes on one machine: this is not scaling.** "
    if any(row["oversubscribed"] for row in found):
        return "**More ranks than cores: this is not scaling.** "
    return ""


def conditions(rows: list[Row]) -> list[str]:
    """Everything that a reader must know of the measurement, as a list."""
    found = list(of_kind(rows, "point"))
    first = found[0]
    foreign = [row["foreign_share"] for row in found]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    placements = sorted({row["placement"] for row in found})
    machines = max(len(set(row["hosts"])) for row in found)
    commits = sorted({row["commit"] for row in found})
    lines = [
        f"- {first['cpu']}, {first['cores']} cores, {first['threads']} thread(s) for each rank, "
        f"{machines} machine(s), {first['memory_gib']} GiB, Linux {first['kernel']}; "
        f"{first['mpi']}, Python {first['python']}, {versions}.",
        f"- Placements (nodes x ranks of a node): {', '.join(placements)}. Transport: "
        f"{', '.join(sorted({row['transport'] for row in found}))}. {first['point']['precision']}.",
        f"- {first['date']} to {found[-1]['date']}; commit {', '.join(commits)}.",
        f"- Other programs took {median(foreign):.1%} of the processors (median point), {max(foreign):.1%} at most.",
        f"- A step takes as long as its slowest rank. Medians [{CONFIDENCE:.0%} interval of order statistics]; "
        f"speed-up and efficiency [{CONFIDENCE:.0%} percentile bootstrap of the ratio of medians, {RESAMPLES} draws]. "
        "Steps of one job are not independent: intervals say nothing about other allocations, for which --jobs "
        "repeats a point.",
    ]
    if machines == 1 and any(row["point"]["ranks"] > 1 for row in found):
        lines.append(
            "- All ranks share one machine's memory, caches and clock: nothing here says how a network scales."
        )
    return lines


def _scaling_table(curve: Curve) -> str:
    header = ["ranks", "nodes", "step, ms", "predicted, ms", "speed-up", "efficiency"]
    header.append("GFLOP/s/rank")
    cells = []
    for measured in curve.points:
        base = measured is curve.base
        ups, efficiency = curve.speed_up(measured), curve.efficiency(measured)
        cells.append(
            [
                str(measured.point.ranks),
                str(measured.point.nodes),
                with_spread(measured.step, 1),
                "–" if measured.predicted_ms is None else f"{measured.predicted_ms:.1f}",
                "1" if base else _ratio(ups),
                "1" if base else _ratio(efficiency),
                f"{measured.tflops * 1e3:,.4g}",
            ]
        )
    return table(header, cells)


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
    cells = [
        [
            str(m.point.ranks),
            f"{m.planned_nbytes / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / m.planned_nbytes:.3f}",
            f"{m.pss_nbytes / MIB:,.1f}",
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
        verdict = (
            "equal" if worst <= LOSS_TOLERANCE else "**NOT equal: they do not train the same**"
        )
        lines.append(
            f"- Losses of {name}: {len(members)} points, at most {worst:.1e} apart over "
            f"{min(len(row['losses']) for row in members)} steps: {verdict} (tolerance {LOSS_TOLERANCE:g})."
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
    names += ["planned_nbytes", "ledger_nbytes", "pss_over_start_nbytes", "commit"]
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
                    len(m.steps_ms),
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
                    m.rows[0]["commit"],
                ]
            )
    return out.getvalue()


def write_tables(rows: list[Row], path: Path) -> None:
    """``.csv`` and ``.md`` beside ``path``."""
    path.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{text(rows)}\n", encoding="utf-8")


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
