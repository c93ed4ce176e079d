"""The report of `scaling.parallel`: a table and a plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scaling.evidence.neighbours import BUSY_SHARE
from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread


def times(rows: list[Row], contender: str) -> dict[int, float]:
    """Seconds of a step by round, of the slowest rank."""
    return {
        row["round"]: max(row["seconds"]) / row["steps"]
        for row in of_kind(rows, "turn")
        if row["contender"] == contender
    }


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    header = [
        "layout",
        "hpczero, ms",
        "torch, ms",
        "hpczero / torch",
        "goal",
        "met",
        "losses apart",
    ]
    cells = []
    for row in of_kind(rows, "match"):
        own, other = times(rows, row["own"]), times(rows, row["other"])
        if not own or not other:
            continue
        ratio = Spread.of(paired_ratios(own, other))
        mine, theirs = (Spread.of(list(found.values())) for found in (own, other))
        cells.append(
            [
                f"{row['match']} ({row['title']})",
                with_spread(mine, 1, scale=1e3),
                with_spread(theirs, 1, scale=1e3),
                with_spread(ratio, 2),
                f"{row['goal']:g}",
                "yes" if ratio.median <= row["goal"] else "no",
                f"{row['apart']:.1e}",
            ]
        )
    return "\n".join([heading(rows), "", table(header, cells)])


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    turns = list(of_kind(rows, "turn"))
    shares = [row["foreign_cpu_s"] / (row["window_s"] * head["cores"]) for row in turns]
    foreign = median(shares) if shares else 0.0
    busy = "**Busy machine: these times are no result.** " if foreign > BUSY_SHARE else ""
    crowded = "; more ranks than cores" if head["ranks"] > head["cores"] else ""
    return (
        f"{busy}{head['description']}, {head['precision']}, {head['ranks']} ranks of one thread{crowded}; AdamW, "
        f"clipped. Both sides of a layout train in turns, {head['rounds']} rounds; losses agreed within "
        f"{head['tolerance']:g} before times were taken. Median of the slowest rank's step; torch over gloo. Other "
        f"programs took {foreign:.1%} of the processors (median turn). {where_and_when(head)}"
    )


def draw(rows: list[Row], path: Path) -> None:
    """Own time over torch's as bars, to ``path`` (PNG)."""
    bars = []
    for row in of_kind(rows, "match"):
        ratios = paired_ratios(times(rows, row["own"]), times(rows, row["other"]))
        if ratios:
            spread = Spread.of(ratios)
            bars.append(Bar(row["match"], spread.median, spread.low, spread.high))
    head = next(of_kind(rows, "run"))
    title = (
        f"{head['description']}, {head['precision']}, {head['ranks']} ranks\n{where_and_when(head)}"
    )
    if bars:
        draw_bars({"step time, hpczero / torch": bars}, path, title=title)
