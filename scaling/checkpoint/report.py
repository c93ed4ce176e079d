"""The report of `scaling.checkpoint`: tables, goals and plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round; the slowest rank
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

TITLES = {
    "raw": "raw bytes",
    "posix": "hpczero, posix",
    "mpio": "hpczero, mpio",
    "dcp": "torch DCP, FSDP2",
}
OWN = ("posix", "mpio")
SHARE_OF_RAW = 0.8
SPARE_NBYTES = 512 * 2**20

Rounds = dict[int, float]


def seconds(rows: list[Row], what: str) -> dict[str, Rounds]:
    """By way and round, of the slowest rank; ``what`` is ``save`` or ``load``."""
    found: dict[str, Rounds] = {}
    for row in of_kind(rows, "move"):
        found.setdefault(row["way"], {})[row["round"]] = max(row[f"{what}_s"])
    return {way: found[way] for way in TITLES if way in found}


def text(rows: list[Row]) -> str:
    """Heading, tables and goals; markdown."""
    return "\n".join(
        [
            heading(rows),
            "",
            speeds(rows, "save"),
            speeds(rows, "load"),
            background(rows),
            memory(rows),
            "Goals, by the median:",
            "",
            *(f"- {line}" for line in goals(rows)),
        ]
    )


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    mpi_io = f", OMPI_MCA_io={head['mpi_io']}" if head["mpi_io"] else ""
    return (
        f"Checkpoints of {head['description']}: {head['state_nbytes'] / 1e6:,.0f} MB of fp32 weights and moments of "
        f"Adam, {head['ranks']} ranks, {head['cores']} cores of {head['cpu']}, {head['filesystem']}; hpczero stage 3, "
        f"HDF5 {head['hdf5']}{mpi_io}; torch {head['versions'].get('torch', '?')}. Every way ends with fsync (DCP's "
        "default, sync_files=True); loads are cold for the kernel of this machine. Median of "
        f"{head['rounds']} rounds, each way once in each, in an order drawn anew. Commit {head['commit']}, "
        f"{head['date']}."
    )


def speeds(rows: list[Row], what: str) -> str:
    """Table of one direction; the last two columns say how many times as fast as raw bytes and as DCP."""
    found, nbytes = seconds(rows, what), next(of_kind(rows, "run"))["state_nbytes"]
    header = [what, "ms", "MB/s", "x raw", "x DCP"]
    cells = []
    for way, values in found.items():
        rates = Spread.of([nbytes / value / 1e6 for value in values.values()])
        ratios = [
            "1" if way == other else with_spread(ratio(found, other, way), 2)
            for other in ("raw", "dcp")
        ]
        times = with_spread(Spread.of(list(values.values())), 0, scale=1e3)
        cells.append([TITLES[way], times, with_spread(rates, 0), *ratios])
    return table(header, cells)


def ratio(found: dict[str, Rounds], numerator: str, denominator: str) -> Spread | None:
    """Of times within rounds; None where one was not measured."""
    if numerator not in found or denominator not in found:
        return None
    values = paired_ratios(found[numerator], found[denominator])
    return Spread.of(values) if values else None


def holds(rows: list[Row]) -> dict[str, list[float]]:
    """Seconds of each round by what took them; ``cost`` is the hold and what the steps beside the write take more."""
    found: dict[str, list[float]] = {}
    for row in of_kind(rows, "hold"):
        quiet = fmean(_slowest(row["quiet_s"]))
        busy = _slowest(row["busy_s"])
        values = {
            "copy": max(row["copy_s"]),
            "hold": max(row["hold_s"]),
            "quiet": quiet,
            "busy": fmean(busy),
            "write": max(row["write_s"]),
            "cost": max(row["hold_s"]) + sum(busy) - quiet * len(busy),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def background(rows: list[Row]) -> str:
    """Table of saves in the background."""
    found = holds(rows)
    if not found:
        return "Saves in the background: not measured, this MPI lets one thread call it.\n"
    lines = {
        "copy": "plain copy of the shards",
        "hold": "save() holds the training",
        "quiet": "step without a write",
        "busy": "step beside a write",
        "write": "until the checkpoint is complete",
        "cost": "a save costs the training",
    }
    cells = [[said, with_spread(Spread.of(found[k]), 0, scale=1e3)] for k, said in lines.items()]
    for said, numerator, denominator in (
        ("hold / copy", "hold", "copy"),
        ("step beside / without", "busy", "quiet"),
    ):
        cells.append([said, with_spread(_ratio_of(found, numerator, denominator), 2)])
    return table(["in the background", "ms or ratio"], cells)


def memory(rows: list[Row]) -> str:
    """Table of the memory beside the state itself."""
    head = next(of_kind(rows, "run"))
    cells = [
        [
            TITLES[row["way"]],
            *(f"{max(row[f'{what}_extra_nbytes']) / 2**20:.0f}" for what in ("save", "load")),
        ]
        for row in of_kind(rows, "memory")
    ]
    limit = (head["shard_nbytes"] + SPARE_NBYTES) / 2**20
    said = f"extra MiB (shard {head['shard_nbytes'] / 2**20:.0f}, limit {limit:.0f})"
    return table([said, "save", "load"], cells)


def goals(rows: list[Row]) -> list[str]:
    """One line for each: what is asked for, what was found, whether it is met."""
    lines = []
    found = {what: seconds(rows, what) for what in ("save", "load")}
    limit = next(of_kind(rows, "run"))["shard_nbytes"] + SPARE_NBYTES
    for way in (way for way in OWN if way in found["save"]):
        asked = [("save", "raw", SHARE_OF_RAW), ("save", "dcp", 1.0), ("load", "dcp", 1.0)]
        for what, other, least in asked:
            spread = ratio(found[what], other, way)
            if spread is not None:
                lines.append(
                    f"{what} by {TITLES[way]}: {with_spread(spread, 2)} x {TITLES[other]}, at least {least:g}: "
                    + _met(spread.median >= least)
                )
        for row in of_kind(rows, "memory"):
            if row["way"] == way:
                most = max(row["save_extra_nbytes"] + row["load_extra_nbytes"])
                lines.append(
                    f"extra memory of {TITLES[way]}: {most / 2**20:.0f} MiB, at most {limit / 2**20:.0f}: "
                    + _met(most <= limit)
                )
    spread = _ratio_of(holds(rows), "hold", "copy")
    if spread is not None:
        said = f"hold of a save in the background: {with_spread(spread, 2)} x a copy, at most 1: "
        lines.append(said + _met(spread.median <= 1.0))
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Rates as bars, to ``path`` (PNG)."""
    head = next(of_kind(rows, "run"))
    panels = {}
    for what in ("save", "load"):
        bars = []
        for way, values in seconds(rows, what).items():
            rate = Spread.of([head["state_nbytes"] / value / 1e6 for value in values.values()])
            bars.append(Bar(TITLES[way], rate.median, rate.low, rate.high))
        panels[f"{what}, MB/s"] = bars
    draw_bars(
        panels, path, title=f"{head['description']}, {head['ranks']} ranks\n{where_and_when(head)}"
    )


def _ratio_of(found: dict[str, list[float]], numerator: str, denominator: str) -> Spread | None:
    if not found:
        return None
    return Spread.of(
        paired_ratios(*(dict(enumerate(found[name])) for name in (numerator, denominator)))
    )


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of each step, over ranks."""
    return [max(step) for step in zip(*ranks, strict=True)]


def _met(holds_: bool) -> str:
    return "met" if holds_ else "missed"
