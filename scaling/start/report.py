"""The report of `scaling.start`: a table from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from scaling.evidence.record import Row, of_kind
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

THIS, OTHER = "this", "against"
# What is looked at of each kind of case, and what it is called.
LOOKED_AT = {
    "run": (("first_s", "first line"), ("header_s", "header")),
    "mistakes": (("told_s", "told"), ("ended_s", "job ended")),
    "help": (("ended_s", "help"),),
}


def seconds(rows: list[Row]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Seconds by round, of each (what, ranks) and tree."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    groups = list(LOOKED_AT)
    for row in sorted(
        of_kind(rows, "start"), key=lambda r: (groups.index(r["group"]), r["case"], r["ranks"])
    ):
        for key, called in LOOKED_AT[row["group"]]:
            if row[key] is not None:
                what = (f"{row['case']}: {called}", str(row["ranks"] or "–"))
                found.setdefault(what, {}).setdefault(row["tree"], {})[row["round"]] = row[key]
    return found


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head = next(of_kind(rows, "run"))
    header = ["what", "ranks", "s"]
    if head["against"]:
        header += ["s, the other checkout", "other / this"]
    cells = []
    for (what, ranks), trees in seconds(rows).items():
        mine, other = trees.get(THIS, {}), trees.get(OTHER, {})
        row = [what, ranks, _spread(list(mine.values()))]
        if head["against"]:
            row += [_spread(list(other.values())), _spread(paired_ratios(other, mine))]
        cells.append(row)
    return "\n".join([heading(head), "", table(header, cells)])


def heading(head: Row) -> str:
    """What was run, where, when."""
    against = f" beside {head['against']}" if head["against"] else ""
    return (
        f"Seconds from the start of the launcher, median of {head['rounds']} [least, most, or 95 % interval], in "
        f"turns; {head['cores']} cores of {head['cpu']}, load {head['load']:.1f} before the first. "
        f"Commit {head['commit']}{against}, {head['date']}."
    )


def _spread(values: list[float]) -> str:
    return with_spread(Spread.of(values) if values else None, 2)
