"""Training by the command with blocks that are computed again: the same bits wherever their inputs rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpczero.run.results.metrics import StepMetrics, read_metrics
from tests.helpers.runs import train

SIZES = {
    "model__layers": 7,
    "model__hidden": 128,
    "model__context": 64,
    "train__global_batch": 8,
    "train__accumulation": 2,
    "train__steps": 3,
    "checkpoint__every": 0,
}
INPUT_NBYTES = 2 * 64 * 128 * 4  # of a micro-batch of two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("activations")


def run(folder: Path, name: str, **options: Any) -> tuple[list[StepMetrics], str]:
    done = train(folder, run__name=name, **{**SIZES, **options}).ended()
    return read_metrics(folder / name / "metrics.jsonl"), done.stdout


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[StepMetrics]:
    """Without checkpointing."""
    return run(folder, "none")[0]


WAYS: dict[str, dict[str, Any]] = {
    "block": {"activations__checkpointing": "block"},
    "selective": {"activations__checkpointing": "selective"},
    "block-disk": {"activations__checkpointing": "block", "activations__rest": "disk"},
    "selective-disk": {"activations__checkpointing": "selective", "activations__rest": "disk"},
    "old-option": {"model__checkpoint_activations": "true", "activations__rest": "disk"},
    "everything": {
        "activations__checkpointing": "block",
        "activations__rest": "disk",
        "offload__optimizer": "disk",
        "offload__gradients": "disk",
        "offload__parameters": "disk",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_same_bits_and_bytes_are_counted(
    folder: Path, expected: list[StepMetrics], way: str
) -> None:
    disk = "disk" in WAYS[way].values()
    where: dict[str, Any] = {"activations__buffers": 2} if disk else {}
    if disk:  # of both, where activations have none of their own
        where["offload__folder" if way == "everything" else "activations__folder"] = folder
    found, told = run(folder, way, **WAYS[way], **where)
    assert [(s.loss, s.grad_norm) for s in found] == [(s.loss, s.grad_norm) for s in expected]
    moved = 2 * 6 * INPUT_NBYTES if disk else None  # two micro-batches, all inputs but the newest
    for step in found:
        assert (step.activations_read_nbytes, step.activations_written_nbytes) == (moved, moved)
        assert (step.activations_waited_ms is None) == (not disk)
        assert (step.tier_read_nbytes is None) == (way != "everything")
    assert "computed again in backward, inputs on " + ("disk" if disk else "device") in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activations__rest": "host"}, "the same memory"),
        ({"activations__rest": "disk", "activations__folder": "."}, "saves nothing"),
        ({"activations__rest": "disk", "activations__folder": "/dev/shm"}, "lies in memory"),
    ],
)
def test_what_saves_nothing_ends_the_job_with_78(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    few = {"model__layers": 2 if text == "saves nothing" else 9}
    more = {"activations__checkpointing": "block", "activations__buffers": 2}
    done = train(tmp_path, **{**SIZES, **few, **more, **options}).ended(78)
    assert text in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_what_is_asked_for_stays_where_the_planner_chooses_the_rest(folder: Path) -> None:
    asked = {"activations__checkpointing": "selective", "parallel__auto": "true"}
    _, told = run(folder, "auto", **{**asked, "train__accumulation": 1})
    assert "each block but its products computed again" in told
