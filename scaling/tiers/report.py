"""The report of `scaling.tiers`: tables and plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from pathlib import Path

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

TIMES = (
    "pass from disk",
    "pass in memory",
    "disk of a pass",
    "step from disk",
    "step in memory",
    "disk of a step",
)
Times = dict[str, dict[int, float]]


def by_case(rows: list[Row], what: str) -> Times:
    """Figure ``what`` by case and round, of the cases that have it."""
    found: Times = {}
    for row in of_kind(rows, "case"):
        if what in row:
            found.setdefault(row["case"], {})[row["round"]] = row[what]
    return found


def text(rows: list[Row]) -> str:
    """Heading and tables; markdown."""
    return "\n".join([heading(rows), "", _times(rows), "", _ratios(rows)])


def _times(rows: list[Row]) -> str:
    took, waited, rates = (by_case(rows, what) for what in ("seconds", "waited_s", "rate"))
    cells = [
        [
            name,
            with_spread(Spread.of(list(took[name].values())), 2),
            with_spread(Spread.of(list(waited[name].values())), 2) if "from" in name else "–",
        ]
        for name in TIMES
        if name in took
    ]
    for name, values in sorted(rates.items()):
        cells.append([name, f"{with_spread(Spread.of(list(values.values())), 0, 1e-6)} MB/s", "–"])
    return table(["case", "seconds", "of them waits for the disk"], cells)


def ratios(rows: list[Row]) -> dict[str, Spread]:
    """What the tier is judged by."""
    took, waited, rates = (by_case(rows, what) for what in ("seconds", "waited_s", "rate"))
    bound = {
        kind: {
            number: max(took[f"disk of a {kind}"][number], took[f"{kind} in memory"][number])
            for number in took[f"{kind} from disk"]
        }
        for kind in ("step", "pass")
    }
    found = {
        f"{kind} from disk / the longer of disk alone and memory": paired_ratios(
            took[f"{kind} from disk"], bound[kind]
        )
        for kind in ("step", "pass")
    }
    found["waits of a pass / its disk alone"] = paired_ratios(
        waited["pass from disk"], took["disk of a pass"]
    )
    for way in ("reads", "writes"):
        if f"fio {way}" in rates:
            found[f"engine {way} / fio {way}"] = paired_ratios(
                rates[f"engine {way}"], rates[f"fio {way}"]
            )
    return {name: Spread.of(values) for name, values in found.items()}


def _ratios(rows: list[Row]) -> str:
    cells = [[name, with_spread(spread, 2)] for name, spread in ratios(rows).items()]
    return table(["ratio within a round", "median [interval]"], cells)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    return (
        f"{head['description']}, stage 3, everything on a tier: {head['tier']}; {head['staging']}; {head['ranks']} "
        f"rank(s) of one thread on {head['cores']} cores of {head['cpu']}; fp32, fused AdamW; losses equal bit for "
        f"bit. Median of {head['rounds']} rounds [95 % interval, or least and most]. Commit {head['commit']}, "
        f"{head['date']}."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Seconds as bars, to ``path`` (PNG)."""
    took = by_case(rows, "seconds")
    bars = []
    for name in TIMES:
        spread = Spread.of(list(took[name].values()))
        bars.append(Bar(name, spread.median, spread.low, spread.high))
    head = next(of_kind(rows, "run"))
    title = f"{head['description']}\n{where_and_when(head)}"
    draw_bars({"seconds, all ranks at a time": bars}, path, title=title)
