"""The training command with a part of the model elsewhere, the host's step and the delayed update."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.run.results.metrics import StepMetrics, read_metrics
from tests.helpers.mpirun import Finished
from tests.runs.test_train_command import train

ON_HOST = {"offload__optimizer": "host", "offload__gradients": "host", "offload__step": "host"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloaded")


def run(folder: Path, name: str, **options: object) -> tuple[Finished, list[StepMetrics]]:
    given = {"train__steps": 8, "evaluation__every": 4, "model__layers": 3, **options}
    done = train(2, folder, run__name=name, **given)
    assert done.returncode == 0, done
    return done, read_metrics(folder / name / "metrics.jsonl")


@pytest.mark.slow
def test_fraction_and_side_change_no_loss_and_the_delay_changes_all_but_the_first(
    folder: Path,
) -> None:
    _, resident = run(folder, "resident")
    said, part = run(folder, "part", **ON_HOST, offload__fraction=0.5)
    assert "stepped on by the host, at least 50.0% of them" in said.stdout, said
    assert [step.loss for step in part] == [step.loss for step in resident]
    assert [step.held_out_loss for step in part] == [step.held_out_loss for step in resident]
    delayed, late = run(folder, "delayed", **ON_HOST, offload__delayed="true")
    assert "one step late (this changes the result)" in delayed.stdout, delayed
    assert "this changes the result (delayed=True)" in delayed.stdout + delayed.stderr, delayed
    first, *others = [a.loss == b.loss for a, b in zip(late, resident, strict=True)]
    assert first
    assert not any(others)
    assert late[-1].loss < late[0].loss
    _, twice = run(folder, "again", **ON_HOST, offload__delayed="true")
    assert [step.loss for step in twice] == [step.loss for step in late]


def test_a_delay_without_the_host_s_step_is_refused_before_anything_starts(folder: Path) -> None:
    done = train(2, folder, run__name="wrong", offload__optimizer="host", offload__delayed="true")
    assert done.returncode == 78, done
    assert "delayed with step device" in done.stderr, done
