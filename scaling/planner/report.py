"""The report of `scaling.planner`: a table and a plot from its rows.

Owns: what is compared with what. Must not know: how it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.table import table

NEAR_FASTEST, NEAR_SEEN = 0.15, 0.25  # what is asked of a planner


@dataclass(frozen=True)
class Verdict:
    """Of one setting.

    Attributes:
        setting: in words.
        choice: what the planner chose, at its first probe.
        best: the fastest of all that were trained.
        slower: seconds of the choice over those of the best.
        foretold: seconds that were foretold for the choice over those seen.
        tried: how many were trained.
        fitting: how many fit.
    """

    setting: str
    choice: str
    best: str
    slower: float
    foretold: float
    tried: int
    fitting: int


def verdicts(rows: list[Row]) -> list[Verdict]:
    """One of each setting. Times are medians over the rounds; foretold is held against seen within a round."""
    found = []
    turns = list(of_kind(rows, "turn"))
    for setting in dict.fromkeys(row["setting"] for row in turns):
        mine = [row for row in turns if row["setting"] == setting]
        took: dict[str, list[float]] = {}
        for row in mine:
            took.setdefault(row["candidate"], []).append(row["seconds"])
        seen = {candidate: median(values) for candidate, values in took.items()}
        chosen = [row for row in mine if row["is_choice"]]
        choice = chosen[0]["candidate"]
        best = min(seen, key=lambda candidate: seen[candidate])
        found.append(
            Verdict(
                setting=setting,
                choice=choice,
                best=best,
                slower=max(seen[row["candidate"]] for row in chosen) / seen[best],
                foretold=median(row["foretold_s"] / row["seconds"] for row in chosen),
                tried=len(seen),
                fitting=max(row["fitting"] for row in mine),
            )
        )
    return found


def summary(rows: list[Row]) -> str:
    """How many choices are near the fastest, how many times near those seen; of the choices, and of all."""
    found = verdicts(rows)
    fast = sum(one.slower <= 1 + NEAR_FASTEST for one in found)
    right = sum(abs(one.foretold - 1) <= NEAR_SEEN for one in found)
    ratios = sorted(row["foretold_s"] / row["seconds"] for row in of_kind(rows, "turn"))
    return (
        f"{fast} of {len(found)} choices within {NEAR_FASTEST:.0%} of the fastest that was trained; {right} of "
        f"{len(found)} foretold within {NEAR_SEEN:.0%} of what was seen. Foretold / seen of all {len(ratios)} turns: "
        f"median {median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}."
    )


def text(rows: list[Row]) -> str:
    """Heading, table and summary; markdown."""
    head = next(of_kind(rows, "run"))
    cells = [
        [
            found.setting,
            found.choice,
            "the choice" if found.best == found.choice else found.best,
            f"{found.slower:.2f}",
            f"{found.foretold:.2f}",
            f"{found.tried} of {found.fitting}",
        ]
        for found in verdicts(rows)
    ]
    titles = ["asked for", "choice", "fastest", "choice / fastest", "foretold / seen", "trained"]
    return "\n".join(
        [
            f"{head['ranks']} rank(s) of one thread, {head['rounds']} rounds of {head['steps']} steps, fp32, fused "
            f"AdamW. {where_and_when(head)}",
            "",
            table(titles, cells),
            "",
            summary(rows),
        ]
    )


def draw(rows: list[Row], path: Path) -> None:
    """Choice over fastest, and foretold over seen."""
    found = verdicts(rows)
    panels = {
        "choice / fastest": [Bar(one.setting, one.slower) for one in found],
        "foretold / seen": [Bar(one.setting, one.foretold) for one in found],
    }
    head = next(of_kind(rows, "run"))
    title = f"the planner, {head['ranks']} rank(s)\n{where_and_when(head)}"
    draw_bars(panels, path, title=title)
