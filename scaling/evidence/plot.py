"""Plots of measurements, written without a display.

matplotlib takes a second to import, so it is imported by what draws, not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.evidence.record import Row, head_of, where_and_when
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
    parts: Mapping[str, float] = field(default_factory=dict)  # from its left end on, by name

    @classmethod
    def of(cls, label: str, values: Spread | Iterable[float], scale: float = 1.0) -> Bar:
        """The median of ``values`` with its interval, each times ``scale``."""
        spread = values if isinstance(values, Spread) else Spread.of(values)
        return cls(label, spread.median * scale, spread.low * scale, spread.high * scale)


Panels = Mapping[str, Sequence[Bar]]  # by the name of their axis; the same labels in each


def as_bars(
    panels_of: Callable[[list[Row]], tuple[str, Panels]],
    wanted: tuple[float, float, float] | None = None,
) -> Callable[[list[Row], Path], None]:
    """What draws the rows of a report as bars at a path (PNG or SVG); ``wanted`` is as of ``bars_figure``.

    ``panels_of`` says the title and the panels. Machine, commit and day stand below the title.
    """

    def draw(rows: list[Row], path: Path) -> None:
        title, panels = panels_of(rows)
        title = f"{title}\n{where_and_when(head_of(rows))}"
        bars_figure(panels, title=title, wanted=wanted).savefig(path)

    return draw


def bars_figure(
    panels: Panels, *, title: str, wanted: tuple[float, float, float] | None = None
) -> Figure:
    """Horizontal bars, up to three panels beside each other.

    Args:
        panels: what is drawn.
        title: above all.
        wanted: where bars should end: the least, the best and the most; drawn as a band with a line.
    """
    most = max(len(bars) for bars in panels.values())
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(6 * max(columns, 2), rows * (1.5 + 0.35 * most))
    figure.suptitle(title, fontsize="medium")
    for place, (axis, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        labels = [bar.label for bar in bars]
        axes.barh(labels, [bar.value for bar in bars], color="tab:blue", alpha=0.6)
        left = [0.0] * len(bars)
        parts = dict.fromkeys(part for bar in bars for part in bar.parts)
        for part, colour in zip(parts, COLOURS, strict=False):
            widths = [bar.parts.get(part, 0.0) for bar in bars]
            axes.barh(labels, widths, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
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
    if any(bar.parts for bars in panels.values() for bar in bars):
        figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    return figure


@dataclass(frozen=True)
class Line:
    """One line."""

    label: str  # in the legend; lines of one label look alike in every panel
    points: Mapping[Any, float]  # y by x, both above 0; Any: int or float
    style: str = "-"  # dashes as matplotlib writes them, such as ``:``
    joined: bool = True  # whether there is a line between the points
    reference: bool = False  # a bound or an ideal, no result: black, without markers
    ends: Mapping[Any, tuple[float, float]] = field(default_factory=dict)  # of bars through points
    of: str = ""  # label of the line whose colour it has, without markers


def lines_figure(
    panels: Mapping[str, Sequence[Line]],
    *,
    title: str,
    x: str,
    y: str | Mapping[str, str],
    from_zero: Collection[str] = (),
    show_x: Callable[[float], str] = "{:,.0f}".format,
    legend: str | None = None,
    log_x: bool = True,
) -> Figure:
    """Lines over logarithmic axes, one panel beside the other.

    Args:
        panels: lines by the name of their panel.
        title: above all.
        x: name and unit of the horizontal axes.
        y: of the vertical ones; of each panel, if they differ.
        from_zero: panels whose vertical axis is linear and begins at 0.
        show_x: how a value of x is written below its axis.
        legend: title of the legend.
        log_x: whether the horizontal axes are logarithmic, with the values of the points alone below.
    """
    from matplotlib import ticker

    figure = new_figure(7 * len(panels), 6)
    figure.suptitle(title, fontsize="medium")
    every = [line for lines in panels.values() for line in lines]
    results = [line.label for line in every if not (line.reference or line.of)]
    looks = dict(zip(dict.fromkeys(results), distinct(), strict=False))
    shown: dict[str, Line2D] = {}
    for place, (name, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for line in lines:
            xs = sorted(line.points)
            ys = [line.points[x] for x in xs]
            colour, marker = ("black", "") if line.reference else looks[line.of or line.label]
            style, marker = line.style if line.joined else "", "" if line.of else marker
            (drawn,) = axes.plot(xs, ys, color=colour, linestyle=style, label=line.label)
            drawn.set_marker(marker)
            drawn.set_markevery(-(-len(xs) // 10))
            shown.setdefault(line.label, drawn)
            for x_of, (low, high) in line.ends.items():
                axes.plot([x_of, x_of], [low, high], color=colour, marker="_", linewidth=1.4)
        if log_x:
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
    look: dict[str, Any] = {"loc": "outside lower center", "fontsize": "small", "title": legend}
    figure.legend(shown.values(), shown.keys(), ncols=2 if legend else 4, **look)
    return figure


def distinct() -> Iterator[tuple[str, str]]:
    """Pairs of colour and marker without end, no two alike before all are used; neighbours differ in both."""
    for turn in itertools.count():
        for number, colour in enumerate(COLOURS):
            yield colour, MARKERS[(number + turn) % len(MARKERS)]
