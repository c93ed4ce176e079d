"""The report of `scaling.overhead`: a table from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round.
"""

from __future__ import annotations

from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

GOALS = {"stage 0": 1.5, "stage 3": 1.9}  # of plain torch's thread time, at most (issue 20)
WAITS_GOAL = 1


def totals(rows: list[Row], name: str) -> dict[int, float]:
    """Thread time of a step by round."""
    return {
        row["round"]: sum(row["seconds"].values())
        for row in of_kind(rows, "turn")
        if row["name"] == name
    }


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head = next(of_kind(rows, "run"))
    names = [row["name"] for row in of_kind(rows, "stepper")]
    parts = list(next(of_kind(rows, "turn"))["seconds"])
    plain = totals(rows, names[0])
    cells = []
    for row in of_kind(rows, "stepper"):
        name = row["name"]
        mine = [turn["seconds"] for turn in of_kind(rows, "turn") if turn["name"] == name]
        ratio = Spread.of(paired_ratios(totals(rows, name), plain))
        goal = GOALS.get(name)
        cells.append(
            [
                name,
                *(f"{Spread.of([turn[part] for turn in mine]).median * 1e3:.2f}" for part in parts),
                with_spread(Spread.of(list(totals(rows, name).values())), 1, scale=1e3),
                with_spread(ratio, 2),
                f"{goal:g}" if goal else "–",
                ("yes" if ratio.median <= goal else "no") if goal else "–",
                str(sum(row["waits"].values())),
            ]
        )
    header = ["", *(f"{part}, ms" for part in parts), "all, ms", "/ plain", "goal", "met", "waits"]
    return (
        f"Thread time of a step with tiny tensors on one rank: {head['description']}, fp32, fused AdamW, clipped; "
        f"median of {head['rounds']} rounds of {head['steps']} steps in turns. Waits: numbers that the host asks of "
        f"tensors in a step, the loss among them. {where_and_when(head)}\n\n{table(header, cells)}"
    )
