"""The report of `scaling.hostcost`: tables from its rows.

Owns: what launches are charged, and the sum over the parts of a step. Must not know: how it was measured.
"""

from __future__ import annotations

from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.table import table

THIS, OTHER = "this", "other"
MIB = 2**20


def launches_s(row: Row, head: Row) -> float:
    """Seconds that the launches of sums in one step are charged."""
    kernels, operations = row["kernels"], row["operations"]
    return 1e-6 * float(kernels * head["kernel_us"] + operations * head["operation_us"])


def seconds(row: Row, head: Row) -> float:
    """Of one step, all parts."""
    measured = row["gather_s"] + row["exchange_s"] + row["agreements_s"]
    return float(measured) + launches_s(row, head)


def text(rows: list[Row]) -> str:
    """Tables of messages and of host time."""
    (head,) = of_kind(rows, "run")
    cases = list(of_kind(rows, "case"))
    other = f"; beside commit {head['against']}" if head["against"] else ""
    title = (
        f"{head['model']}, {head['precision']}, stage 3: collectives of one step, one rank; "
        f"{where_and_when(head)}{other}. "
        f"Launches are charged {head['kernel_us']:g} us (own kernel) and {head['operation_us']:g} us (torch)."
    )
    commits = {THIS: head["commit"], OTHER: head["against"]}
    messages, times = [], []
    for row in cases:
        name = f"{row['ranks']:,} x {row['ranks_per_node']}"
        name += f", {commits[row['tree']]}" if head["against"] else ""
        messages.append(
            [
                name,
                f"{row['gather_messages']:,}",
                f"{row['reduce_messages']:,}",
                f"{row['messages']:,}",
                f"{row['exchange_nbytes'] / MIB:,.0f}",
                f"{row['agreements_nbytes']:,}" if "agreements_nbytes" in row else "–",
            ]
        )
        parts = (row["gather_s"], row["exchange_s"], launches_s(row, head), row["agreements_s"])
        times.append([name, *(f"{part:.3g}" for part in (*parts, seconds(row, head)))])
    counted = [
        "ranks x on a node",
        "messages of a gather",
        "of a reduction",
        "of a step",
        "buffers, MiB",
        "agreements, bytes",
    ]
    timed = [
        "ranks x on a node",
        "gathers, s",
        "exchanges, s",
        "launches, s",
        "agreements, s",
        "all",
    ]
    return f"{title}\n\n{table(counted, messages)}\n{table(timed, times)}"
