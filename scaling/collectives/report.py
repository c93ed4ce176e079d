"""The report of `scaling.collectives`: tables and plot from its rows.

Owns: bandwidths, the bound, what is compared with what. Must not know: how it was measured. Ratios are formed within a
round and only then summarised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaling.evidence.plot import Line, draw_lines
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

LIBRARY = "MPI library"
AUTO = "window, auto"
TITLES = {"all_gather": "All-gather", "reduce_scatter": "Reduce-scatter"}

Times = dict[str, dict[int, float]]  # seconds by mover, then by round


@dataclass(frozen=True)
class Group:
    """One operation at one size.

    Attributes:
        operation: of TITLES.
        shard_nbytes: of one rank.
        times: seconds by mover and round.
        bound_s: no algorithm is faster; None where the rate of the NICs is not known, or there is one node.
    """

    operation: str
    shard_nbytes: int
    times: Times
    bound_s: float | None

    def ratios(self, numerator: str, denominator: str) -> Spread:
        """Of times within a round."""
        return Spread.of(paired_ratios(self.times[numerator], self.times[denominator]))

    def median(self, mover: str) -> float:
        """Seconds."""
        return Spread.of(list(self.times[mover].values())).median

    def best(self, beginning: str, *, but: str = "") -> str | None:
        """The fastest of those whose names begin so."""
        names = [name for name in self.times if name.startswith(beginning) and name != but]
        return min(names, key=self.median, default=None)


def groups(rows: list[Row]) -> list[Group]:
    """In the order of operations and sizes."""
    head = next(of_kind(rows, "run"))
    found: dict[tuple[str, int], Times] = {}
    for row in of_kind(rows, "call"):
        times = found.setdefault((row["operation"], row["shard_nbytes"]), {})
        times.setdefault(row["mover"], {})[row["round"]] = row["seconds"]
    return [
        Group(operation, size, found[operation, size], _bound_s(head, size))
        for operation in TITLES
        for op, size in sorted(found)
        if op == operation
    ]


def _bound_s(head: Row, shard_nbytes: int) -> float | None:
    """(G-1) L S / B: what must come into each node, over its connection (docs/performance.md)."""
    if head["nic_gbit"] is None or head["nodes"] < 2:
        return None
    local = head["ranks"] / head["nodes"]
    return float((head["nodes"] - 1) * local * shard_nbytes * 8 / (head["nic_gbit"] * 1e9))


def text(rows: list[Row]) -> str:
    """Heading, a table for each operation and size, and what the automatic choice is worth; markdown."""
    parts = [heading(rows), ""]
    for group in groups(rows):
        title = f"{TITLES[group.operation]}, {_size(group.shard_nbytes)} of each rank"
        if group.bound_s is not None:
            title += f"; bound {group.bound_s * 1e3:.1f} ms"
        parts += [f"**{title}**", "", _table(rows, group)]
    parts += [*verdicts(rows), ""]
    head = next(of_kind(rows, "run"))
    parts.append(f"Chosen: {head['selection']['description']}.")
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    what = "emulated nodes on one machine (not scaling): " if head["emulated"] else ""
    rate = "" if head["nic_gbit"] is None else f", {head['nic_gbit']:g} Gbit/s for each node"
    return (
        f"{what}{head['ranks']} ranks as {head['placement']}{rate}; {head['cores']} cores of {head['cpu']}, "
        f"{head['mpi']}. fp32; median of {head['rounds']} rounds; a time is that of the slowest rank. Commit "
        f"{head['commit']}, {head['date']}."
    )


def _table(rows: list[Row], group: Group) -> str:
    head = next(of_kind(rows, "run"))
    whole, share = group.shard_nbytes * head["ranks"], (head["ranks"] - 1) / head["ranks"]
    header = ["how", "ms", "algbw, MB/s", "busbw, MB/s", "% of bound", "MPI library / this"]
    cells = []
    for name, times in group.times.items():
        spread = Spread.of(list(times.values()))
        rate = whole / spread.median / 1e6
        reached = "–" if group.bound_s is None else f"{group.bound_s / spread.median:.0%}"
        cells.append(
            [
                name,
                with_spread(spread, 1 if spread.median > 0.01 else 2, scale=1e3),
                f"{rate:,.0f}",
                f"{rate * share:,.0f}",
                reached,
                with_spread(group.ratios(LIBRARY, name), 2) if name != LIBRARY else "1",
            ]
        )
    return table(header, cells)


def verdicts(rows: list[Row]) -> Iterator[str]:
    """The automatic choice against the best that was measured, as ratios of times within a round."""
    for group in groups(rows):
        if AUTO not in group.times:
            continue
        words = []
        for what, name in (
            ("the best two-level one", group.best("window", but=AUTO)),
            ("the best flat one", group.best("flat")),
        ):
            if name is not None:
                words.append(f"{with_spread(group.ratios(AUTO, name), 2)} x {what} ({name})")
        if words:
            size = _size(group.shard_nbytes)
            yield f"- {TITLES[group.operation]} of {size}, automatic: {', '.join(words)}."


def draw(rows: list[Row], path: Path) -> None:
    """Time over size for every mover and the bound, to ``path`` (PNG)."""
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for group in groups(rows):
        lines = panels.setdefault(TITLES[group.operation], {})
        for name in group.times:
            lines.setdefault(name, {})[group.shard_nbytes] = group.median(name) * 1e3
        if group.bound_s is not None:
            lines.setdefault("bound", {})[group.shard_nbytes] = group.bound_s * 1e3
    head = next(of_kind(rows, "run"))
    label = ", emulated" if head["emulated"] else ""
    draw_lines(
        {axis: _lines(lines) for axis, lines in panels.items()},
        path,
        title=f"{head['placement']}{label}, {head['mpi']}\n{where_and_when(head)}",
        x="one rank's shard",
        show_x=lambda nbytes: _size(round(nbytes)),
        y="ms, median",
    )


def _lines(points: Mapping[str, Mapping[float, float]]) -> list[Line]:
    def style(name: str) -> str:
        if name == "bound":
            return ":"
        return {"flat": "--", "wind": "-", "hier": "-."}.get(name[:4], ":")

    return [
        Line(name, dict(values), style(name), reference=name == "bound")
        for name, values in points.items()
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
