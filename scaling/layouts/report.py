"""The report of `scaling.layouts`: tables and a plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

NEAR = 0.2  # how near idle time should be to what a simulation says


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same layouts agree.

    Attributes:
        pairs: of layouts.
        alike: of them, those that both order in the same way.
        clear: pairs whose intervals of the measured median do not overlap.
        clear_alike: the same of these.
    """

    pairs: int
    alike: int
    clear: int
    clear_alike: int

    @property
    def tau(self) -> float:
        """Kendall's rank correlation: 1 for equal orders, -1 for opposite ones; 0 without pairs."""
        return 2 * self.alike / self.pairs - 1 if self.pairs else 0.0


def agreement(foretold: Mapping[str, float], seen: Mapping[str, Spread]) -> Agreement:
    """Of what was foretold with what was seen, layout by layout."""
    alike = clear = clear_alike = 0
    pairs = list(itertools.combinations(seen, 2))
    for a, b in pairs:
        same = (foretold[a] < foretold[b]) == (seen[a].median < seen[b].median)
        apart = seen[a].high < seen[b].low or seen[b].high < seen[a].low
        alike += same
        clear += apart
        clear_alike += same and apart
    return Agreement(len(pairs), alike, clear, clear_alike)


def times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step by layout and round."""
    found: dict[str, dict[int, float]] = {row["layout"]: {} for row in of_kind(rows, "layout")}
    for row in of_kind(rows, "turn"):
        found[row["layout"]][row["round"]] = row["seconds"]
    return {name: values for name, values in found.items() if values}


def text(rows: list[Row]) -> str:
    """Heading, tables and what they come to; markdown."""
    parts = [heading(rows), ""]
    found = times(rows)
    if found:
        parts += [_layouts_table(rows, found), *_order(rows, found)]
    if any(of_kind(rows, "idle")):
        parts += ["", _idle_table(rows)]
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    what = "emulated nodes on one machine (not scaling): " if head["emulated"] else ""
    link = f", links of {head['rate_mbit']:g} Mbit/s" if head["rate_mbit"] else ""
    return (
        f"{what}{head['description']}, {head['ranks']} ranks as {head['placement']}{link}; {head['rounds']} rounds of "
        f"{head['steps']} step(s) of each layout, in turn; fp32, fused AdamW, clipped; losses equal within "
        f"{head['tolerance']:g}. {where_and_when(head)}"
    )


def _layouts_table(rows: list[Row], found: dict[str, dict[int, float]]) -> str:
    reference = next(iter(found))
    header = ["layout", "s per step", "this / first", "foretold, s", "foretold / seen"]
    header += ["MB between nodes per host", "planned, MB", "seen / planned", "waits for stages, s"]
    cells = []
    for row in of_kind(rows, "layout"):
        name = row["layout"]
        if name not in found:
            continue
        turns = [turn for turn in of_kind(rows, "turn") if turn["layout"] == name]
        seen = Spread.of(list(found[name].values()))
        ratio = Spread.of(paired_ratios(found[name], found[reference]))
        counted = [mean(turn["sent_nbytes"]) for turn in turns if turn["sent_nbytes"]]
        planned = mean(row["planned_nbytes"])
        waits = [mean(turn["waited_s"]) for turn in turns if turn["waited_s"]]
        sent = median(counted) if counted else None
        cells.append(
            [
                name,
                with_spread(seen, 3),
                "1" if name == reference else with_spread(ratio, 2),
                f"{row['foretold_s']:.3f}",
                f"{row['foretold_s'] / seen.median:.2f}",
                "–" if sent is None else f"{sent / 1e6:.2f}",
                f"{planned / 1e6:.2f}",
                "–" if sent is None or not planned else f"{sent / planned:.3f}",
                f"{median(waits):.3f}" if waits else "–",
            ]
        )
    return table(header, cells)


def _order(rows: list[Row], found: dict[str, dict[int, float]]) -> list[str]:
    """Both orders, and how far they agree."""
    foretold = {row["layout"]: row["foretold_s"] for row in of_kind(rows, "layout")}
    seen = {name: Spread.of(list(values.values())) for name, values in found.items()}
    by_seen = sorted(seen, key=lambda name: seen[name].median)
    by_plan = sorted(seen, key=lambda name: foretold[name])
    cells = [
        [str(place), plan, real]
        for place, (plan, real) in enumerate(zip(by_plan, by_seen, strict=True), start=1)
    ]
    both = agreement(foretold, seen)
    said = (
        f"{both.alike} of {both.pairs} pairs of layouts are foretold in the order in which they were seen (Kendall's "
        f"tau {both.tau:.2f}); of the {both.clear} pairs whose intervals (up to five rounds: ranges) do "
        f"not overlap, {both.clear_alike}."
    )
    return [table(["place", "foretold", "seen"], cells), said]


def _idle_table(rows: list[Row]) -> str:
    """Idle over busy time; (all of the stages, the first one by its waits for messages alone)."""
    first = next(of_kind(rows, "idle"))
    header = ["pipeline", "idle / busy", "first stage, waits for messages / busy", "simulated"]
    header += ["(p - 1) / (v m)", "seen / simulated"]
    cells, near = [], 0
    names = sorted({row["pipeline"] for row in of_kind(rows, "idle")})
    for name in names:
        mine = [row for row in of_kind(rows, "idle") if row["pipeline"] == name]
        ratios = [_idle(row) for row in mine]
        waits = [_first_waits(row) for row in mine]
        simulated = mine[0]["simulated"]
        seen = Spread.of(ratios)
        near += abs(seen.median / simulated - 1) <= NEAR if simulated else True
        cells.append(
            [
                name,
                with_spread(seen, 3),
                with_spread(Spread.of(waits), 3),
                f"{simulated:.3f}",
                f"{mine[0]['formula']:.3f}",
                f"{seen.median / simulated:.2f}" if simulated else "–",
            ]
        )
    said = (
        f"Idle time of a pipeline of {first['stages']} stages whose blocks sleep ({first['nap_s'] * 1e3:g} ms forward, "
        "twice as long backward), so that ranks do not compete for cores: "
        f"{near} of {len(names)} within {NEAR:.0%} of the simulation."
    )
    return "\n".join([said, "", table(header, cells)])


def _idle(row: Row) -> float:
    """Of all ranks together."""
    return sum(rank["idle"] for rank in row["ranks"]) / sum(rank["busy"] for rank in row["ranks"])


def _first_waits(row: Row) -> float:
    """Of the first stage, which ends the step: all its idle time are waits for messages."""
    first = [rank for rank in row["ranks"] if rank["stage"] == 0]
    return sum(rank["waited"] for rank in first) / sum(rank["busy"] for rank in first)


def draw(rows: list[Row], path: Path) -> None:
    """Seconds seen and foretold, and idle over busy time, as bars; to ``path`` (PNG)."""
    head = next(of_kind(rows, "run"))
    seen = []
    foretold = {row["layout"]: row["foretold_s"] for row in of_kind(rows, "layout")}
    for name, values in times(rows).items():
        spread = Spread.of(list(values.values()))
        seen.append(Bar(name, spread.median, spread.low, spread.high))
    if not seen:
        return
    panels = {"s per step": seen, "foretold, s": [Bar(b.label, foretold[b.label]) for b in seen]}
    label = ", emulated" if head["emulated"] else ""
    title = f"{head['description']}, {head['placement']}{label}\n{where_and_when(head)}"
    draw_bars(panels, path, title=title)
