"""Groups of local steps that are killed: the others go on, and a group that starts again takes the newest mean."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.killed import Job
from tests.helpers.runs import options

SIZES: dict[str, Any] = {
    "model__layers": 1,
    "model__hidden": 32,
    "model__context": 32,
    "train__steps": 120,
    "train__global_batch": 4,
    "evaluation__batches": 0,
    "checkpoint__every": 2,
    "local__steps": 4,
    "local__patience_s": 4.0,
}


class Groups:
    """Two groups of one rank, each a job of its own with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0

    def start(self, group: int) -> Job:
        self._starts += 1
        own = self._folder / f"group-{group}"
        own.mkdir(exist_ok=True)
        given = {"local__group": group, "local__folder": self._folder / "meet", **SIZES}
        log = self._folder / f"log-{self._starts}"
        return Job.start(log, options(own, **given)[2:], ranks=1)

    def metrics(self, group: int) -> Path:
        return self._folder / f"group-{group}" / "r" / "metrics.jsonl"

    def weights(self, group: int) -> str:
        found = (self._folder / f"group-{group}" / "r" / "model.safetensors").read_bytes()
        return hashlib.sha256(found).hexdigest()


def kill(job: Job) -> None:
    for pid in job.ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert job.process.wait(60) not in (0, 75), job.said


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_killed_group_ends_no_other_and_comes_back_with_the_same_weights(tmp_path: Path) -> None:
    groups = Groups(tmp_path)
    with groups.start(0) as other:
        with groups.start(1) as first:
            first.wait_for_step(groups.metrics(1), 10)
            kill(first)
        with groups.start(1) as second:
            assert second.wait_for("average of 2 of 2 groups"), second.said
            second.wait_for_step(groups.metrics(1), 60)
            kill(second)
        assert other.wait() == 0, other.said
        assert "average of 2 of 2 groups after step 60" in other.said, other.said
        assert "average of 1 of 2 groups after step 120; without group(s) 1" in other.said
    with groups.start(1) as third:
        assert third.wait() == 0, third.said
    assert groups.weights(0) == groups.weights(1)
