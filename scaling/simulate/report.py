"""The report of `scaling.simulate`: tables from its rows.

Owns: columns and words. Must not know: how anything was simulated.
"""

from __future__ import annotations

from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.table import table

MB, GB = 1e6, 1e9
SHORT = {
    "compute": "computes",
    "other ranks": "other ranks",
    "links between nodes": "links between",
    "links inside nodes": "inside",
    "sums and messages of the host": "sums, host",
    "other stages": "stages",
}


def text(rows: list[Row]) -> str:
    """Heading and tables; markdown."""
    (head,) = of_kind(rows, "run")
    jobs = list(of_kind(rows, "job"))
    title = (
        f"{head['model']} on {head['title']}, {head['precision']}, micro-batch {head['micro_batch']}, "
        f"{head['accumulation']} forward(s) a step; a message costs its host {head['message_us']:g} us. Simulated, not "
        f"measured; {where_and_when(head)}"
    )
    header = ["ranks x on a node, layout", "step, s", *(f"{SHORT[name]}, s" for name in SHORT)]
    header += [
        "idle, %",
        "links carry, %",
        "GB between, a rank",
        "messages",
        "binds",
        "foretold, s",
    ]
    cells = []
    for row in jobs:
        step_s, (least, most) = row["step_s"], row["idle_s"]
        idle = f"{100 * least / step_s:.1f} to {100 * most / step_s:.1f}"
        cells.append(
            [
                f"{row['ranks']:,} x {row['ranks_per_node']}, {layout(row)}",
                f"{step_s:.3f}",
                *(f"{row['spent'][name]:.3f}" for name in SHORT),
                idle,
                f"{100 * row['links']:.0f}",
                f"{row['between_nbytes'] / GB:.2f}",
                f"{row['messages']:,}",
                row["binds"],
                f"{row['foretold_s']:.3f}",
            ]
        )
    notes = [
        f"{row['ranks']:,} x {row['ranks_per_node']}, {layout(row)}: {row['recorded']} rank(s) recorded, "
        f"{row['calls']:,} calls of one; {row['took_s']:.0f} s and {row['peak_nbytes'] / GB:.1f} GB here; compute "
        f"foretold {row['foretold_compute_s']:.3f} s"
        for row in jobs
    ]
    return "\n".join([title, "", table(header, cells), "", *notes])


def layout(row: Row) -> str:
    """Degrees above 1, and the stage."""
    degrees = {name: degree for name, degree in row["layout"]["mesh"].items() if degree > 1}
    said = " x ".join(f"{name} {degree}" for name, degree in degrees.items()) or "one rank"
    return f"{said}, stage {row['stage']}"
