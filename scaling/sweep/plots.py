"""Figures of a scaling study; every axis has its unit, every figure says when it is no scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError
from scaling.evidence.harness import Report
from scaling.evidence.plot import COLOURS, distinct, new_figure
from scaling.evidence.record import Row, head_of, of_kind
from scaling.evidence.spread import Spread
from scaling.sweep.curves import (
    Curve,
    Measured,
    busy,
    commits,
    computes_on,
    curves,
    loss_difference,
    parity_groups,
)
from scaling.sweep.report import MIB, bars_are_intervals, text
from scaling.sweep.study import ALL_PARTS, Point

if TYPE_CHECKING:  # see scaling.evidence.plot
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
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
    figure, (up, efficiency) = _figure(rows, 2, width=12, height=4.8)
    found = curves(rows)
    ranks = sorted({m.point.ranks for curve in found for m in curve.points})
    bases = sorted({curve.base_ranks for curve in found})
    for base, shade in zip(bases, ("0.4", "0.6", "0.75") * len(bases), strict=False):
        beyond = [r for r in ranks if r >= base]
        name = "ideal" if len(bases) == 1 else f"ideal, N0 = {base}"
        up.plot(beyond, [r / base for r in beyond], color=shade, linestyle="--", label=name)
    efficiency.axhline(100.0, color="0.5", linestyle="--", label="ideal")
    for number, (curve, (colour, marker)) in enumerate(zip(found, distinct(), strict=False)):
        style: dict[str, Any] = {  # Any: keywords of matplotlib
            "color": colour,
            "marker": marker,
            "label": f"{curve.name}, N0 = {curve.base_ranks}",
        }
        shift = 2 ** (0.03 * (number - (len(found) - 1) / 2))  # so that bars do not hide each other
        _with_bars(up, curve, [curve.speed_up(m) for m in curve.points], shift, 1.0, style)
        _prediction(up, efficiency, curve, style["color"])
        bars = [curve.efficiency(m) for m in curve.points]
        _with_bars(efficiency, curve, bars, shift, 100.0, style)
    up.set_yscale("log", base=2)
    over = f"{bases[0]} rank(s)" if len(bases) == 1 else "the N0 ranks of each curve"
    up.set_ylabel(f"speed-up over {over}")
    efficiency.set_ylabel(f"efficiency over {over}, %")
    low, high = efficiency.get_ylim()
    efficiency.set_ylim(min(low, 0.0), max(high, 110.0))
    for axes in (up, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        _plain_ticks(axes, ranks)
    _plain_numbers(up.yaxis)
    handles, names = up.get_legend_handles_labels()
    said = "95 % intervals" if bars_are_intervals(rows) else "ranges, where too few jobs for 95 %"
    legend = {"title": f"bars: {said}", "title_fontsize": "small", "fontsize": "small"}
    figure.legend(handles, names, loc="outside lower center", ncols=2, **legend)
    return figure


def breakdown_figure(rows: list[Row]) -> Figure:
    """Where the time of a step goes, a bar for each point."""
    points = [(curve, m) for curve in curves(rows) for m in curve.points]
    figure, (axes,) = _figure(rows, 1, width=12, height=2.2 + 0.36 * len(points))
    labels = [f"{curve.name}, {m.point.ranks} rank(s)" for curve, m in points]
    left = [0.0] * len(points)
    for part, colour in zip(ALL_PARTS, COLOURS, strict=False):
        widths = [m.part_ms(part) for _, m in points]
        name = "exposed communication" if part == "communication" else part
        axes.barh(labels, widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, mean over steps and ranks (checkpoint: spread over all steps)")
    figure.legend(fontsize="small", loc="outside lower center", ncols=6)
    return figure


def memory_figure(rows: list[Row]) -> Figure:
    """Memory of a rank: what the plan's formula says, what the ledger counted, what the kernel says."""
    points = [(curve, m) for curve in curves(rows) for m in curve.points]
    figure, (axes,) = _figure(rows, 1, width=12, height=2.2 + 0.5 * len(points))
    places = range(len(points))
    kinds: tuple[tuple[str, Callable[[Measured], float]], ...] = (
        ("formula (Plan.memory, activations excluded)", lambda m: m.planned_nbytes),
        ("ledger: buffers and optimizer state held at most", lambda m: m.worst("ledger_nbytes")),
        ("PSS over that before the model: activations and libraries too", lambda m: m.pss_nbytes),
    )
    for number, (name, nbytes) in enumerate(kinds):
        axes.barh(
            [place + 0.27 * (number - 1) for place in places],
            [nbytes(m) / MIB for _, m in points],
            height=0.25,
            color=COLOURS[number],
            label=name,
        )
    axes.set_yticks(list(places), [f"{curve.name}, {m.point.ranks} rank(s)" for curve, m in points])
    axes.invert_yaxis()
    axes.set_xlabel("MiB of the largest rank")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    return figure


def losses_figure(rows: list[Row]) -> Figure:
    """Losses of all points, and how far those on the same samples are apart."""
    figure, (losses, apart) = _figure(rows, 2, width=12, height=4.8)
    looks = distinct()
    for members in parity_groups(rows).values():
        for row in members:
            point = Point.of_json(row["point"])
            colour, marker = next(looks)
            label = f"{point.model}, stage {point.stage}, {point.ranks} rank(s), global batch {point.global_batch}"
            style: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 1.2}
            style |= {"markersize": 4, "markevery": max(1, len(row["losses"]) // 10)}
            losses.plot(range(1, len(row["losses"]) + 1), row["losses"], label=label, **style)
            if row is not members[0]:
                found = [max(x, 1e-9) for x in loss_difference(row, members[0])]
                apart.plot(range(1, len(found) + 1), found, **style)
    losses.set_xlabel("step")
    losses.set_ylabel("loss, nats per token")
    apart.set_xlabel("step")
    apart.set_ylabel("|difference| to the first, nats")
    apart.set_yscale("log")
    apart.set_title("same samples, other ranks or stage (0 is drawn as 1e-9)", fontsize="small")
    if not apart.lines:
        apart.text(
            0.5,
            0.5,
            "no two points train on the same samples",
            ha="center",
            transform=apart.transAxes,
        )
    handles, names = losses.get_legend_handles_labels()
    figure.legend(handles, names, fontsize="small", loc="outside lower center", ncols=2)
    return figure


FIGURES: dict[str, Callable[[list[Row]], Figure]] = {
    "scaling": scaling_figure,
    "breakdown": breakdown_figure,
    "memory": memory_figure,
    "losses": losses_figure,
}


def _figure(
    rows: list[Row], panels: int, *, width: float, height: float
) -> tuple[Figure, list[Axes]]:
    figure = new_figure(width, height, dpi=110)
    head, points = head_of(rows), list(of_kind(rows, "point"))
    devices = " | ".join(sorted({computes_on(row) for row in points}))
    where = f"{devices}, commit {commits(rows)}, {max(row['date'] for row in points)[:10]}"
    title = f"{head['study']} scaling: {where}"
    if any(row["emulated"] for row in points):
        title = f"EMULATED nodes on one machine, NOT scaling ({head['study']} set-up): {where}"
    elif any(row["oversubscribed"] for row in points):
        title = f"MORE RANKS THAN CORES, NOT scaling ({head['study']} set-up): {where}"
    if mixed := {name for curve in curves(rows) for name in curve.mixed}:
        title += f"\nCurves MIX points of different {', '.join(sorted(mixed))}: NOT comparable"
    if busy(rows):
        title = f"BUSY MACHINE, times are no result. {title}"
    figure.suptitle(title, fontsize="medium")
    found = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, found


def _with_bars(
    axes: Axes,
    curve: Curve,
    ratios: Sequence[Spread],
    shift: float,
    scale: float,
    style: dict[str, Any],
) -> None:
    scaled = [ratio.times(scale) for ratio in ratios]
    values = [one.median for one in scaled]
    below = [max(one.median - one.low, 0.0) for one in scaled]
    above = [max(one.high - one.median, 0.0) for one in scaled]
    ranks = [m.point.ranks * shift for m in curve.points]
    axes.errorbar(
        ranks, values, yerr=[below, above], capsize=3, linewidth=1.4, markersize=5, **style
    )


def _prediction(up: Axes, efficiency: Axes, curve: Curve, colour: str) -> None:
    """Dotted: what the model says, from what the ranks measured of the host they ran on."""
    ups = {m.point.ranks: curve.predicted_speed_up(m) for m in curve.points}
    found = {ranks: value for ranks, value in ups.items() if value is not None}
    base = curve.base_ranks
    if len(found) > 1:
        style: dict[str, Any] = {
            "color": colour,
            "linestyle": ":",
            "label": f"{curve.name}, predicted",
        }
        up.plot(list(found), list(found.values()), **style)
        shares = [100 * value * base / ranks for ranks, value in found.items()]
        efficiency.plot(list(found), shares, **style)


def _plain_ticks(axes: Axes, ranks: Sequence[int]) -> None:
    """The numbers of ranks there are, as they are."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    _plain_numbers(axes.xaxis)


def _plain_numbers(axis: Axis) -> None:
    from matplotlib.ticker import ScalarFormatter

    axis.set_major_formatter(ScalarFormatter())


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


REPORT = Report("Weak and strong scaling", text, draw)
