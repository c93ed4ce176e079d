"""Plots of measurements, written without a display.

Owns: how bars and lines look. Must not know: what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: beside it.
        value: its length.
        low, high: ends of the whisker; None: no whisker.
        below: the part of ``value`` to draw darker.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    below: float = 0.0


def draw_bars(
    panels: Mapping[str, Sequence[Bar]],
    path: Path,
    *,
    title: str,
    wanted: tuple[float, float, float] | None = None,
) -> None:
    """Horizontal bars, one panel beside the other, to ``path`` (PNG or SVG).

    Args:
        panels: bars by the name of their axis; the same labels in each.
        path: of the file.
        title: above all.
        wanted: where bars should end: the least, the best and the most; drawn as a band with a line.
    """
    most = max(len(bars) for bars in panels.values())
    figure = Figure(figsize=(6 * len(panels), 1.5 + 0.35 * most), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    for place, (axis, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        labels = [bar.label for bar in bars]
        axes.barh(labels, [bar.value for bar in bars], color="tab:blue", alpha=0.6)
        axes.barh(labels, [bar.below for bar in bars], color="tab:blue")
        for bar in bars:
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [bar.label, bar.label], color="black", linewidth=2)
        if wanted is not None:
            least, best, most_wanted = wanted
            axes.axvspan(least, most_wanted, color="tab:green", alpha=0.15, zorder=0)
            axes.axvline(best, color="tab:green", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        axes.grid(axis="x", alpha=0.3)
        if place:
            axes.set_yticklabels([])
    figure.savefig(path)


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        label: in the legend.
        points: y by x, both above 0.
        style: as matplotlib writes it, such as ``k:``.
        joined: whether there is a line between the points.
    """

    label: str
    points: Mapping[float, float]
    style: str = "-"
    joined: bool = True


def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    path: Path,
    *,
    title: str,
    x: str,
    y: str | Mapping[str, str],
) -> None:
    """Lines over logarithmic axes, one panel beside the other, to ``path`` (PNG or SVG).

    Args:
        panels: lines by the name of their panel.
        path: of the file.
        title: above all.
        x: name and unit of the horizontal axes.
        y: of the vertical ones; of each panel, if they differ.
    """
    figure = Figure(figsize=(7 * len(panels), 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    for place, (name, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for line in lines:
            xs = sorted(line.points)
            ys = [line.points[x] for x in xs]
            (drawn,) = axes.plot(xs, ys, line.style, marker=".", label=line.label)
            if not line.joined:
                drawn.set_linestyle("none")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel(x)
        axes.set_ylabel(y if isinstance(y, str) else y[name])
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
