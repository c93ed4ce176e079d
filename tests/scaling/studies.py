"""Rows of a study, made by hand."""

from __future__ import annotations

from typing import Any

from scaling.evidence.record import Row
from scaling.sweep.study import Grid

MIB = 2**20
KINDS = ("norm", "gelu", "add", "fork", "bias", "copy", "loss")
PROBE: dict[str, Any] = {
    "products": {"64": 1e10, "1024": 5e10},
    "elements": {f"{kind}/{way}": 1e-9 for kind in KINDS for way in ("forward", "backward")},
    "attention": [2e10, 1e10],
    "update": 1e-9,
    "sums": [1e-9, 1e-9],
    "memory_rate": 1e10,
    "dispatch": 1e-6,
    "exchange": 5e9,
    "wait": 1e-5,
}
PARTS = ("compute", "communication", "optimizer", "data", "other", "checkpoint")


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
            "probe": [PROBE] * point.ranks,
        }
        found.append(row | changes)
    return found
