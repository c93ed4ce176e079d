"""Runs from a disk that are killed: nothing stays on it, the job ends at once, and the next one goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpczero.run.results.metrics import read_metrics
from tests.helpers.killed import Job
from tests.helpers.processes import family
from tests.helpers.runs import losses, options, train
from tests.helpers.small_disk import free_nbytes, small_disk

SIZES: dict[str, Any] = {
    "model__layers": 6,
    "model__hidden": 64,
    "model__context": 64,
    "train__steps": 12,
    "train__global_batch": 16,
    "train__accumulation": 2,
    "checkpoint__every": 2,
}
WORDS = {
    "offload__optimizer": "disk",
    "offload__gradients": "disk",
    "offload__parameters": "disk",
    "offload__window": 1,
    "activations__checkpointing": "block",
    "activations__rest": "disk",
    "activations__buffers": 2,
}
ENDS_S = 60.0  # of a machine that does much else
DISK_NBYTES = 32 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """On a file system of its own."""
    with small_disk(tmp_path, DISK_NBYTES) as path:
        if path is None:
            pytest.skip("cannot mount a file system: needs root and mkfs.ext4")
        yield path


def killed(folder: Path, words: list[str], *, after: int, every: bool, dice: random.Random) -> None:
    """Start the run, and kill one rank or all of them at a moment after step ``after``; it is gone within seconds."""
    with Job.start(folder / f"log-{after}", words, ranks=2) as job:
        job.wait_for_step(folder / "r" / "metrics.jsonl", after)
        time.sleep(0.2 * dice.random())
        ranks = job.ranks
        assert len(ranks) == 2, ranks
        began = time.monotonic()
        for pid in ranks if every else [dice.choice(ranks)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert job.process.wait(ENDS_S) not in (0, 75), job.said
        while time.monotonic() - began < ENDS_S and family(job.process.pid):
            time.sleep(0.02)
        assert not family(job.process.pid), "ranks that outlive their job"


def comes_back(disk: Path, nbytes: int) -> bool:
    """Whether ``nbytes`` are free again; the system may close the files of a killed process a moment later."""
    limit = time.monotonic() + ENDS_S
    while free_nbytes(disk) != nbytes and time.monotonic() < limit:
        time.sleep(0.05)
    return free_nbytes(disk) == nbytes


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_killed_run_leaves_nothing_on_its_disk_and_goes_on_with_the_same_losses(
    tmp_path: Path, disk: Path
) -> None:
    dice = random.Random(0)
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    given = {**SIZES, **WORDS, "offload__folder": disk}
    train(folders[0], **given).ended()
    before = free_nbytes(disk)
    words = options(folders[1], **given)[2:]
    for after, every in ((3, False), (6, True)):
        killed(folders[1], words, after=after, every=every, dice=dice)
        assert not list(disk.iterdir())
        assert comes_back(disk, before)
    train(folders[1], **given).ended()
    assert losses(folders[1]) == losses(folders[0])
    norms = [
        [step.grad_norm for step in read_metrics(folder / "r" / "metrics.jsonl")]
        for folder in folders
    ]
    assert norms[0] == norms[1]
    weights = [(folder / "r" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    assert not list(disk.iterdir())
