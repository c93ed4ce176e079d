"""Plots of measurements, written without a display.

matplotlib takes a second to import, so it is imported by what draws, not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scaling.evidence.spread import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito: told apart by everybody; black is for what is no result.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f24")
MARKERS = "os^Dvp*"


def new_figure(width: float, height: float, *, dpi: int = 120) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class Bar:
    """One bar."""

    label: str  # beside it
    value: float  # its length
    low: float | None = None  # ends of the whisker; None: no whisker
    high: float | None = None
    below: float = 0.0  # the part of ``value`` to draw darker

    @classmethod
    def of(cls, label: str, values: Spread | Iterable[float], scale: float = 1.0) -> Bar:
        """The median of ``values`` with its interval, each times ``scale``."""
        spread = values if isinstance(values, Spread) else Spread.of(values)
        return cls(label, spread.median * scale, spread.low * scale, spread.high * scale)


def draw_bars(
    panels: Mapping[str, Sequence[Bar]],
    path: Path,
    *,
    title: str,
    wanted: tuple[float, float, float] | None = None,
) -> None:
    """Horizontal bars, up to three panels beside each other, to ``path`` (PNG or SVG).

    Args:
        panels: bars by the name of their axis; the same labels in each.
        path: of the file.
        title: above all.
        wanted: where bars should end: the least, the best and the most; drawn as a band with a line.
    """
    most = max(len(bars) for bars in panels.values())
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(6 * columns, rows * (1.5 + 0.35 * most))
    figure.suptitle(title, fontsize="medium")
    for place, (axis, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
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
        if place % columns:
            axes.set_yticklabels([])
    figure.savefig(path)


@dataclass(frozen=True)
class Line:
    """One line."""

    label: str  # in the legend; lines of one label look alike in every panel
    points: Mapping[float, float]  # y by x, both above 0
    style: str = "-"  # dashes as matplotlib writes them, such as ``:``
    joined: bool = True  # whether there is a line between the points
    reference: bool = False  # a bound or an ideal, no result: black, without markers


def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    path: Path,
    *,
    title: str,
    x: str,
    y: str | Mapping[str, str],
    from_zero: Collection[str] = (),
    show_x: Callable[[float], str] = "{:,.0f}".format,
) -> None:
    """Lines over logarithmic axes, one panel beside the other, to ``path`` (PNG or SVG).

    Args:
        panels: lines by the name of their panel.
        path: of the file.
        title: above all.
        x: name and unit of the horizontal axes.
        y: of the vertical ones; of each panel, if they differ.
        from_zero: panels whose vertical axis is linear and begins at 0.
        show_x: how a value of x is written below its axis.
    """
    from matplotlib import ticker

    figure = new_figure(7 * len(panels), 6)
    figure.suptitle(title, fontsize="medium")
    results = [line.label for lines in panels.values() for line in lines if not line.reference]
    looks = dict(zip(dict.fromkeys(results), distinct(), strict=False))
    shown: dict[str, Line2D] = {}
    for place, (name, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for line in lines:
            xs = sorted(line.points)
            ys = [line.points[x] for x in xs]
            colour, marker = ("black", "") if line.reference else looks[line.label]
            style = line.style if line.joined else ""
            (drawn,) = axes.plot(xs, ys, markersize=6, color=colour, marker=marker, linestyle=style)
            shown.setdefault(line.label, drawn)
        axes.set_xscale("log", base=2)
        there = sorted({x for line in lines for x in line.points})
        axes.xaxis.set_major_locator(ticker.FixedLocator(there))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: show_x(value)))
        if name in from_zero:
            axes.set_ylim(bottom=0.0, top=1.1 * axes.get_ylim()[1])
        else:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            few = high < 20 * low  # powers of ten alone would be too few
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel(x)
        axes.set_ylabel(y if isinstance(y, str) else y[name])
        axes.grid(alpha=0.3)
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize="small"
    )
    figure.savefig(path)


def distinct() -> Iterator[tuple[str, str]]:
    """Pairs of colour and marker without end, no two alike before all are used; neighbours differ in both."""
    for turn in itertools.count():
        for number, colour in enumerate(COLOURS):
            yield colour, MARKERS[(number + turn) % len(MARKERS)]
