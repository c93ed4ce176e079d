"""Tiny runs of the training command, and what they have left.

Must not know: what any test looks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpczero.checkpoint.disk.folder import Folder
from hpczero.run.results.metrics import read_metrics
from tests.helpers.mpirun import ROOT, Finished, run_typed

STEPS = 24
TINY = {
    "run.name": "r",
    "model.preset": "gpt-micro",
    "model.context": "16",
    "train.steps": str(STEPS),
    "checkpoint.every": "5",
    "evaluation.batches": "0",
    "log.plot": "false",
    "log.tensorboard": "false",
    "log.progress": "lines",
}


def options(folder: Path, **changes: Any) -> list[str]:
    named = {name.replace("__", "."): str(value) for name, value in changes.items()}
    given = {**TINY, "run.folder": str(folder), "data.cache": str(cache()), **named}
    return ["-m", "hpczero.train", *(word for k, v in given.items() for word in (f"--{k}", v))]


def cache() -> Path:
    """One token file for all tests of this machine's run."""
    return ROOT / "runs" / "tokens"


def train(folder: Path, ranks: int = 2, **changes: Any) -> Finished:
    return run_typed(ranks, options(folder, **changes), timeout=90)


def losses(folder: Path, name: str = "r") -> list[float]:
    metrics = read_metrics(folder / name / "metrics.jsonl")
    assert [m.step for m in metrics] == list(range(1, len(metrics) + 1))
    return [m.loss for m in metrics]


def steps(folder: Path, name: str = "r") -> list[int]:
    return [m.step for _, m in Folder(folder / name / "checkpoints").valid()]
