"""Rows made by hand, and what tests of measurements share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from scaling.evidence.record import Row, read_rows
from scaling.sweep.study import Grid
from tests.helpers.mpirun import run_command, run_ranks

MIB = 2**20
KINDS = ("norm", "gelu", "add", "fork", "bias", "copy", "loss")
PARTS = ("compute", "communication", "optimizer", "data", "other", "checkpoint")


def probe(slower: float = 1.0, *, alone: bool = False) -> Row:
    """What one rank measures that computes 1e9 / ``slower`` FLOP/s at side 64 and four times that from 256 on."""
    return {
        "products": {"64": 1e9 / slower, "256": 4e9 / slower, "1024": 4e9 / slower},
        "elements": {
            f"{kind}/{way}": 1e-9 * slower for kind in KINDS for way in ("forward", "backward")
        },
        "attention": [2e9 / slower, 1e9 / slower],
        "update": 3e-9 * slower,
        "sums": [1e-9 * slower, 2e-9 * slower],
        "memory_rate": 1e12 / slower,
        "dispatch": 1e-6 * slower,
        "exchange": None if alone else 5e9 / slower,
        "wait": None if alone else 1e-5 * slower,
    }


def head(**others: object) -> Row:
    """The first row of a record."""
    where = {"machine": "a machine", "cpu": "a CPU", "cores": 2, "load": 0.25}
    when = {"commit": "abc", "date": "2026-01-01", "versions": {"torch": "2"}}
    return {"kind": "run", **where, **when, **others}


def cells(said: str, begins: str) -> list[str]:
    """Of the first line of a table whose first cell begins so."""
    line = next(line for line in said.splitlines() if line.startswith(f"| {begins}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def check_drawn(draw: Callable[[list[Row], Path], None], found: list[Row], folder: Path) -> None:
    draw(found, folder / "plot.png")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def measured(
    ranks: int,
    words: str,
    folder: Path,
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 280,
    fresh: bool = False,
) -> tuple[list[Row], str]:
    """Run ``python -m scaling.WORDS``: the rows of the file ``name``, and what was printed.

    Args:
        ranks: of its job; 0: a process that starts its ranks itself.
        words: the command and its options.
        folder: that gets its results.
        name: of the file without suffix.
        env: as of ``run_ranks``.
        timeout: likewise.
        fresh: as of ``run_command``, without ranks.
    """
    command = ["-m", *f"scaling.{words}".split(), "--results", str(folder / "results")]
    if ranks:
        done = run_ranks(ranks, command, timeout, env).ended()
    else:
        done = run_command([sys.executable, *command], timeout, env, fresh=fresh).ended()
    (file,) = (folder / "results").rglob(f"{name}.jsonl")
    return read_rows(file), done.stdout


def rows(
    kind: str = "strong",
    *,
    times: dict[int, float] | None = None,
    stages: tuple[int, ...] = (3,),
    grow: bool = False,
    **changes: object,
) -> list[Row]:
    """A study whose steps take ``times[ranks]`` ms, 1 % more in every second step, on a machine of many cores."""
    times = times or {1: 100.0, 2: 60.0, 4: 40.0}
    models = ["tiny", "gpt-micro", "gpt-nano"] if grow else ["tiny"]
    grid = Grid(kind, grow, models, stages, sorted(times), [8])  # type: ignore[arg-type]
    found: list[Row] = [
        {
            "kind": "run",
            "study": kind,
            "grow": grow,
            "definition": grid.definition,
            "steps": 10,
            "warm_up": 1,
            "asked_at": "abc",
            "points_asked": 4,
            "points_done": 3,
            "malformed": 2,
        }
    ]
    for point in grid.points(steps=10, warm_up=1):
        slow = [times[point.ranks] * (1.01 if step % 2 else 1.0) for step in range(10)]
        shares = {"compute": 0.7, "communication": 0.2, "optimizer": 0.1}
        samples = {
            part: [
                [ms * shares.get(part, 0.0) / (r + 1) for r in range(point.ranks)] for ms in slow
            ]
            for part in PARTS
        }
        samples["checkpoint"][4] = [50.0] * point.ranks
        row: Row = {
            "kind": "point",
            "point": point.as_json(),
            "commit": "abc",
            "cpu": "a CPU",
            "cores": 8,
            "memory_gib": 64,
            "kernel": "6",
            "mpi": "an MPI",
            "python": "3",
            "versions": {"torch": "2"},
            "date": "today",
            "placement": f"1x{point.ranks}",
            "hosts": [0] * point.ranks,
            "emulated": False,
            "oversubscribed": False,
            "transport": "shared memory on one node" if point.ranks > 1 else "flat, all-gather x",
            "threads": 1,
            "flops_per_token": 1000 * point.config.layers,
            "samples_ms": samples,
            "losses": [5.0 - 0.1 * step for step in range(14)],
            "pss_peak_nbytes": [300 * MIB] * point.ranks,
            "pss_baseline_nbytes": [250 * MIB] * point.ranks,
            "ledger_nbytes": [39 * MIB] * point.ranks,
            "planned": {"total": 40 * MIB},
            "foreign_share": 0.01,
            "probe": [probe()] * point.ranks,
        }
        found.append(row | changes)
    return found
