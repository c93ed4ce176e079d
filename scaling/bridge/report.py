"""The report of `scaling.bridge`: table and plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from pathlib import Path

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

Case = tuple[str, str, int]


def times(rows: list[Row], name: str = "seconds") -> dict[Case, dict[str, dict[int, float]]]:
    """Seconds, or CPU seconds of a rank (``cpu_s``), by case, backend and round."""
    found: dict[Case, dict[str, dict[int, float]]] = {}
    for row in of_kind(rows, "call"):
        case = (row["verb"], row["dtype"], row["mib"])
        found.setdefault(case, {}).setdefault(row["backend"], {})[row["round"]] = row[name]
    return found


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    cells, spent = [], times(rows, "cpu_s")
    for (verb, dtype, mib), found in times(rows).items():
        spreads = [Spread.of(list(found[name].values())) for name in ("bridge", "gloo")]
        ratio = Spread.of(paired_ratios(found["gloo"], found["bridge"]))
        cells.append(
            [
                f"{verb} {dtype} {mib} MiB",
                *(with_spread(spread, 2, scale=1e3) for spread in spreads),
                with_spread(ratio, 2),
                " / ".join(
                    f"{1e3 * Spread.of(list(spent[verb, dtype, mib][name].values())).median:.1f}"
                    for name in ("bridge", "gloo")
                ),
            ]
        )
    header = ["call", "bridge, ms", "gloo, ms", "gloo / bridge", "CPU ms of a rank"]
    return "\n".join([heading(rows), "", table(header, cells)])


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    return (
        f"torch.distributed over MPI and over gloo, {head['ranks']} ranks as {head['placement']}; {head['cores']} "
        f"cores of {head['cpu']}, load {head['load']:.1f} at the start. Median of {head['rounds']} calls of each, in "
        f"turn; equal results. Commit {head['commit']}, {head['date']}."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Times of the largest calls as bars, to ``path`` (PNG)."""
    found = times(rows)
    most = max(mib for _, _, mib in found)
    bars: dict[str, list[Bar]] = {}
    for (verb, dtype, mib), backends in found.items():
        if mib == most:
            for name, values in sorted(backends.items()):
                spread = Spread.of(list(values.values()))
                bars.setdefault(f"{verb} {dtype}, ms", []).append(
                    Bar(name, spread.median * 1e3, spread.low * 1e3, spread.high * 1e3)
                )
    head = next(of_kind(rows, "run"))
    draw_bars(bars, path, title=f"{most} MiB, {head['placement']}\n{where_and_when(head)}")
