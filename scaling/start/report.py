"""The report of `scaling.start`: a table from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from scaling.evidence.record import Row, of_kind
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

THIS, OTHER = "this", "against"
COUNTS = ("opened", "looked", "missed", "shared", "shared_names")
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
    timed = [heading(head), "", table(header, cells)] if cells else []
    return "\n".join([*timed, *files(rows, head)])


def files(rows: list[Row], head: Row) -> list[str]:
    """Heading and table of the files that a rank looks for; nothing where none were counted."""
    found = list(of_kind(rows, "files"))
    if not found:
        return []
    header = ["ranks", "commit", "opened", "looked at", "of these missing", "shared", "names"]
    cells = []
    for ranks, tree in dict.fromkeys((row["ranks"], row["tree"]) for row in found):
        mine = [row for row in found if (row["ranks"], row["tree"]) == (ranks, tree)]
        commit = head["commit" if tree == THIS else "against"]
        counts = [_range([row[key] for row in mine]) for key in COUNTS]
        cells.append([str(ranks), commit, *counts])
    title = (
        "Files that one rank of hpczero.train opens and looks at until a run of one step is over, least to most of its "
        "ranks; shared: below the checkout, the environment and its interpreter, calls and different names. "
        f"Commit {head['commit']}, {head['date']}."
    )
    return [title, "", table(header, cells)]


def _range(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


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
