"""The report of `scaling.transports`: table and plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from pathlib import Path

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread


def times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step by transport and round."""
    found: dict[str, dict[int, float]] = {}
    for row in of_kind(rows, "step"):
        found.setdefault(row["transport"], {})[row["round"]] = row["seconds"]
    return found


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    found, reference = times(rows), _reference(rows)
    header = ["transport", "ms per step", f"{reference} / this"]
    cells = []
    for name, values in found.items():
        ratio = Spread.of(paired_ratios(found[reference], values))
        said = "1" if name == reference else with_spread(ratio, 2)
        cells.append([name, with_spread(Spread.of(list(values.values())), 0, scale=1e3), said])
    described = [
        f"- {row['transport']}: {row['description']}" for row in of_kind(rows, "transport")
    ]
    return "\n".join([heading(rows), "", table(header, cells), *described])


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    what = "emulated nodes on one machine (not scaling): " if head["emulated"] else ""
    link = f", {head['link']}" if head["link"] else ""
    return (
        f"{what}{head['description']}, stage {head['stage']}, {head['ranks']} ranks as {head['placement']}{link}; "
        f"{head['cores']} cores of {head['cpu']}; fp32, fused AdamW. Median of {head['rounds']} steps of each, "
        f"in turn; losses equal bit for bit. Commit {head['commit']}, {head['date']}."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Step times as bars, to ``path`` (PNG)."""
    bars = []
    for name, values in times(rows).items():
        spread = Spread.of(list(values.values()))
        bars.append(Bar(name, spread.median * 1e3, spread.low * 1e3, spread.high * 1e3))
    head = next(of_kind(rows, "run"))
    label = ", emulated" if head["emulated"] else ""
    draw_bars(
        {"ms per step": bars},
        path,
        title=f"{head['description']}, {head['placement']}{label}\n{where_and_when(head)}",
    )


def _reference(rows: list[Row]) -> str:
    """``flat``, or the first where it was left out."""
    names = [row["transport"] for row in of_kind(rows, "transport")]
    return "flat" if "flat" in names else names[0]
