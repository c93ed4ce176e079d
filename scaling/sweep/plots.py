"""Figures of a scaling study; every axis has its unit, every figure says when it is no scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError
from scaling.evidence.harness import Report
from scaling.evidence.plot import Bar, Line, bars_figure, lines_figure
from scaling.evidence.record import Row, head_of, of_kind
from scaling.evidence.spread import Spread
from scaling.sweep import report
from scaling.sweep.curves import Curve, Measured, computes_on, curves
from scaling.sweep.study import ALL_PARTS, Point

if TYPE_CHECKING:  # see scaling.evidence.plot
    from matplotlib.figure import Figure


def draw(rows: list[Row], path: Path) -> None:
    """All figures, as ``<stem>-<figure><suffix>`` beside ``path``; its suffix says PNG or SVG."""
    layouts = head_of(rows)["study"] == "layouts"
    for name, make in FIGURES.items():
        if layouts and make is scaling_figure:  # of one number of ranks
            continue
        figure = make(rows)
        figure.savefig(path.with_name(f"{path.stem}-{name}{path.suffix}"), facecolor="white")


def scaling_figure(rows: list[Row]) -> Figure:
    """Speed-up and efficiency over ranks, each curve over its own N0, with the ideal line of every N0 and 95 % bars."""
    found = curves(rows)
    ranks = sorted({m.point.ranks for curve in found for m in curve.points})
    bases = sorted({curve.base_ranks for curve in found})
    ups: list[Line] = []
    efficiencies = [Line("ideal", dict.fromkeys(ranks, 100.0), "--", reference=True)]
    for base in bases:
        name = "ideal" if len(bases) == 1 else f"ideal, N0 = {base}"
        points = {r: r / base for r in ranks if r >= base}
        ups.append(Line(name, points, "--", reference=True))
    for curve in found:
        name = f"{curve.name}, N0 = {curve.base_ranks}"
        ups.append(_with_bars(name, curve, curve.speed_up, 1.0))
        efficiencies.append(_with_bars(name, curve, curve.efficiency, 100.0))
        # What the model says, from what the ranks measured of the host they ran on.
        predicted = {m.point.ranks: curve.predicted_speed_up(m) for m in curve.points}
        known = {r: value for r, value in predicted.items() if value is not None}
        if len(known) > 1:
            ideal = {r: 100 * value * curve.base_ranks / r for r, value in known.items()}
            for lines, points in ((ups, known), (efficiencies, ideal)):
                lines.append(Line(f"{curve.name}, predicted", points, ":", of=name))
    over = f"{bases[0]} rank(s)" if len(bases) == 1 else "the N0 ranks of each curve"
    sure = report.bars_are_intervals(rows)
    said = "95 % intervals" if sure else "ranges, where too few jobs for 95 %"
    return lines_figure(
        {"speed-up": ups, "efficiency": efficiencies},
        title=_title(rows),
        x="ranks",
        y={"speed-up": f"speed-up over {over}", "efficiency": f"efficiency over {over}, %"},
        from_zero=["efficiency"],
        legend=f"bars: {said}",
    )


def _with_bars(name: str, curve: Curve, ratio: Callable[[Measured], Spread], scale: float) -> Line:
    found = {m.point.ranks: ratio(m).times(scale) for m in curve.points}
    points = {ranks: one.median for ranks, one in found.items()}
    return Line(name, points, ends={ranks: (one.low, one.high) for ranks, one in found.items()})


def breakdown_figure(rows: list[Row]) -> Figure:
    """Where the time of a step goes, a bar for each point."""
    bars = []
    for name, m in _points(rows):
        parts = {part: m.part_ms(part) for part in ALL_PARTS}
        parts["exposed communication"] = parts.pop("communication")
        bars.append(Bar(name, sum(parts.values()), parts=parts))
    axis = "ms of a step, mean over steps and ranks (checkpoint: spread over all steps)"
    return bars_figure({axis: bars}, title=_title(rows))


def memory_figure(rows: list[Row]) -> Figure:
    """Memory of a rank: what the plan's formula says, what the ledger counted, what the kernel says."""
    bars = []
    for name, m in _points(rows):
        bars.append(Bar(f"{name}: formula", m.planned_nbytes / report.MIB))
        bars.append(Bar(f"{name}: ledger", m.worst("ledger_nbytes") / report.MIB))
        bars.append(Bar(f"{name}: PSS", m.pss_nbytes / report.MIB))
    axis = (
        "MiB of the largest rank. Formula: Plan.memory, activations excluded. Ledger: buffers and optimizer state\n"
        "held at most. PSS: over that before the model, activations and libraries too"
    )
    return bars_figure({axis: bars}, title=_title(rows))


def _points(rows: list[Row]) -> list[tuple[str, Measured]]:
    """All points with their names."""
    return [
        (f"{curve.name}, {m.point.ranks} rank(s)", m)
        for curve in curves(rows)
        for m in curve.points
    ]


def losses_figure(rows: list[Row]) -> Figure:
    """Losses of all points, and how far those on the same samples are apart."""
    losses, apart = [], []
    for members in report.parity_groups(rows).values():
        for row in members:
            point = Point.of_json(row["point"])
            name = f"{point.model}, stage {point.stage}, {point.ranks} rank(s), global batch {point.global_batch}"
            losses.append(Line(name, dict(enumerate(row["losses"], 1))))
            if row is not members[0]:
                found = [max(x, 1e-9) for x in report.loss_difference(row, members[0])]
                apart.append(Line(name, dict(enumerate(found, 1))))
    panels = {
        "all points": losses,
        "same samples, other ranks or stage (0 is drawn as 1e-9)": apart,
    }
    units = ("loss, nats per token", "|difference| to the first, nats")
    return lines_figure(
        {name: lines for name, lines in panels.items() if lines},
        title=_title(rows),
        x="step",
        y=dict(zip(panels, units, strict=True)),
        from_zero=["all points"],
        log_x=False,
    )


FIGURES: dict[str, Callable[[list[Row]], Figure]] = {
    "scaling": scaling_figure,
    "breakdown": breakdown_figure,
    "memory": memory_figure,
    "losses": losses_figure,
}


def _title(rows: list[Row]) -> str:
    head, points = head_of(rows), list(of_kind(rows, "point"))
    devices = " | ".join(sorted({computes_on(row) for row in points}))
    where = f"{devices}, commit {report.commits(rows)}, {max(row['date'] for row in points)[:10]}"
    title = f"{head['study']} scaling: {where}"
    if any(row["emulated"] for row in points):
        title = f"EMULATED nodes on one machine, NOT scaling ({head['study']} set-up): {where}"
    elif any(row["oversubscribed"] for row in points):
        title = f"MORE RANKS THAN CORES, NOT scaling ({head['study']} set-up): {where}"
    if mixed := {name for curve in curves(rows) for name in curve.mixed}:
        title += f"\nCurves MIX points of different {', '.join(sorted(mixed))}: NOT comparable"
    return f"BUSY MACHINE, times are no result. {title}" if report.busy(rows) else title


# Of a point, what text and figures read.
NEEDS = (
    "cpu cores commit date point versions mpi python kernel memory_gib threads placement hosts emulated oversubscribed "
    "transport flops_per_token samples_ms losses pss_peak_nbytes pss_baseline_nbytes ledger_nbytes planned "
    "foreign_share probe"
)


def is_point(row: Row) -> bool:
    """Whether a row is a point with at least one step, in all its parts."""
    try:
        Point.of_json(row["point"])
        return row.keys() >= set(NEEDS.split()) and all(
            row["samples_ms"][part] for part in ALL_PARTS
        )
    except (ConfigError, KeyError, TypeError):
        return False


REPORT = Report("Weak and strong scaling", report.text, draw)
