"""Runs that are stopped, killed and taken up again, by the training command on real MPI jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.checkpoint.disk.folder import Folder
from hpczero.models import PRESETS
from hpczero.run.results.metrics import read_metrics
from hpczero.run.results.weights import step_of_weights
from tests.checkpoint.programs import state_digests
from tests.helpers.killed import Job
from tests.helpers.mpirun import run_ranks
from tests.helpers.runs import STEPS, losses, options, steps, train
from tests.runs.two_runs import damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder).ended()
    assert steps(folder) == [24, 20, 15]
    return folder, losses(folder)


@pytest.mark.worth("resume with the same bits")
def test_stopped_run_exits_75_and_goes_on_with_the_same_bits(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    ask(tmp_path, "STOP")
    job = train(tmp_path).ended(75)
    assert "stopped after step 1, as asked" in job.said, job
    assert not (tmp_path / "r" / "STOP").exists()
    assert not (tmp_path / "r" / "model.safetensors").exists()
    assert steps(tmp_path) == [1]
    job = train(tmp_path).ended()
    assert "step-000000001: step 1, saved by 2 rank(s)" in job.said, job
    assert losses(tmp_path) == whole[1]
    ours, theirs = (f / "r" / "model.safetensors" for f in (tmp_path, whole[0]))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_stop_that_is_heard_in_the_last_step_finds_a_finished_run(tmp_path: Path) -> None:
    ask(tmp_path, "STOP")
    train(tmp_path, ranks=1, train__steps=1).ended()
    assert (tmp_path / "r" / "model.safetensors").exists()


def test_run_without_lower_losses_ends_with_its_results_and_forgets_nothing(tmp_path: Path) -> None:
    patient: dict[str, Any] = {
        "evaluation__every": 1,
        "evaluation__batches": 1,
        "train__learning_rate": 3.0,
    }
    patient |= {"train__warmup": 1, "checkpoint__every": 0}
    job = train(tmp_path, 2, **patient, evaluation__patience=2).ended()
    found = read_metrics(tmp_path / "r" / "metrics.jsonl")
    lowest = min(found, key=lambda m: m.held_out_loss or 0.0)
    end = lowest.step + 2
    assert [m.held_out_since for m in found[-3:]] == [0, 1, 2]
    assert found[-1].step == end < STEPS
    assert steps(tmp_path) == [end]
    said = f"stopped early after step {end} of {STEPS}: the held-out loss has not been below "
    assert f"{said}{lowest.held_out_loss:.4f} in 2 evaluations in a row" in job.said, job
    assert step_of_weights(tmp_path / "r" / "model.safetensors") == end
    refused = train(tmp_path, 1, **patient, evaluation__patience=2).ended(78)
    assert "holds a finished run" in refused.stderr, refused
    again = train(tmp_path, 1, **patient, evaluation__patience=4).ended()
    found = read_metrics(tmp_path / "r" / "metrics.jsonl")[end:]
    assert [m.held_out_since for m in found] == [3, 4], again
    # Without the value of before the first of them would have been the lowest.
    first, second = [m.held_out_loss or 0.0 for m in found]
    assert second < first


def test_other_ranks_and_stage_go_on_with_the_next_sample(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    ask(tmp_path, "STOP")
    train(tmp_path, ranks=3, parallel__stage=1).ended(75)
    train(tmp_path, ranks=1).ended()
    np.testing.assert_allclose(losses(tmp_path), whole[1], rtol=1e-6)


def ask(folder: Path, what: str) -> None:
    """Before the run begins: to stop, or to save."""
    (folder / "r").mkdir()
    (folder / "r" / what).touch()


def start(folder: Path, **changes: Any) -> Job:
    return Job.start(folder / "stdout", options(folder, **changes)[2:], ranks=2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_to_one_rank_saves_once_and_stops_all(tmp_path: Path, number: int) -> None:
    with start(tmp_path, train__steps=100_000, checkpoint__every=0) as job:
        job.wait_for_step(tmp_path / "r" / "metrics.jsonl", 3)
        victims = job.ranks
        assert len(victims) == 2, victims
        os.kill(victims[-1], number)
        os.kill(victims[-1], number)  # impatient
        assert job.wait() == 75, job.said
    (step,) = steps(tmp_path)
    assert step == len(losses(tmp_path)) >= 3


def test_save_file_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    ask(tmp_path, "SAVE")
    train(tmp_path, checkpoint__every=0).ended()
    assert steps(tmp_path) == [1]
    assert not (tmp_path / "r" / "SAVE").exists()


def test_saves_in_the_background_are_the_same_checkpoints(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    train(tmp_path, checkpoint__background="true").ended()
    assert losses(tmp_path) == whole[1]
    ours, theirs = (
        [(m.step, state_digests(path)) for path, m in Folder(folder / "r" / "checkpoints").valid()]
        for folder in (tmp_path, whole[0])
    )
    assert ours == theirs


@pytest.fixture
def stopped(twelve: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 4, 8 and 12 that was not finished."""
    shutil.copytree(twelve / "r", tmp_path / "runs" / "r")
    (tmp_path / "runs" / "r" / "model.safetensors").unlink()
    return tmp_path / "runs"


def test_corrupt_newest_is_named_and_the_older_one_used(stopped: Path) -> None:
    newest, _, _ = Folder(stopped / "r" / "checkpoints").candidates()
    damage(newest)
    job = train(stopped, train__steps=14).ended()
    assert f"{newest}: corrupt: elements" in job.said, job
    assert re.search(r"going on from the older .*step-000000008", job.said), job
    assert len(losses(stopped)) == 14


def test_nothing_sound_left_is_65_and_nothing_is_deleted(stopped: Path) -> None:
    found = Folder(stopped / "r" / "checkpoints").candidates()
    for path in found:
        damage(path)
    job = train(stopped, train__steps=14).ended(65)
    assert "2 older ones are not sound either" in job.stderr, job
    assert Folder(stopped / "r" / "checkpoints").candidates() == found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__global_batch": 24}, "train.global_batch was 12 and is 24"),
        ({"run__seed": 5}, "run.seed was 0 and is 5"),
        ({"model__layers": 1}, "model.layers was None and is 1"),
        ({"resume__from": "nowhere"}, "nowhere does not exist"),
        ({"train__steps": 11}, "has 12 steps behind it, and train.steps is 11"),
    ],
)
def test_other_options_are_refused_before_anything_changes(
    stopped: Path, changes: dict[str, Any], said: str
) -> None:
    before = (stopped / "r" / "metrics.jsonl").read_bytes()
    job = train(stopped, **{"train__steps": 14, **changes}).ended(78)
    assert said in job.stderr, job
    assert (stopped / "r" / "metrics.jsonl").read_bytes() == before


def test_finished_run_goes_on_only_if_asked_for_more(whole: tuple[Path, list[float]]) -> None:
    folder, before = whole
    job = train(folder).ended(78)
    assert "holds a finished run of 24 steps" in job.stderr, job
    assert "--run.overwrite true" in job.stderr, job
    assert losses(folder) == before


def test_model_newer_than_any_checkpoint_is_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    ask(tmp_path, "SAVE")
    changes = {"checkpoint__every": 0, "train__steps": 3}
    train(tmp_path, ranks=1, **changes).ended()
    assert steps(tmp_path) == [1]
    model = (tmp_path / "r" / "model.safetensors").read_bytes()
    job = train(tmp_path, ranks=1, **{**changes, "train__steps": 4}).ended()
    assert "step-000000001: step 1" in job.said, job
    (aside,) = (tmp_path / "r" / "checkpoints").glob("aside-*")
    assert (aside / "model.safetensors").read_bytes() == model
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 3


def test_run_lost_before_its_results_were_written_writes_them(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "r" / "model.safetensors"
    expected = weights.read_bytes()
    weights.unlink()
    job = train(tmp_path).ended()
    assert "going on from" in job.said, job
    assert weights.read_bytes() == expected
    assert losses(tmp_path) == whole[1]


def test_other_data_are_refused(stopped: Path) -> None:
    text = stopped / "text.txt"
    text.write_text("another text, quite short but long enough for two splits. " * 2000)
    job = train(stopped, train__steps=14, data__path=text, data__cache=stopped / "tokens").ended(78)
    assert "data was" in job.stderr, job


def test_another_run_may_begin_where_this_one_is(stopped: Path) -> None:
    source = stopped / "r" / "checkpoints"
    train(stopped, train__steps=14, run__name="other", resume__from=source).ended()
    first = json.loads((stopped / "other" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 13


# The training command, which says at its end how many elements of initial weights this rank has made.
COUNTS_DRAWN = """
import atexit, sys
from hpczero.errors import run
from hpczero.models.initial import InitialWeights
from hpczero.train import main

drawn, fill_range = [], InitialWeights.fill_range

def counted(self, name, shape, start, values):
    drawn.append(len(values))
    fill_range(self, name, shape, start, values)

InitialWeights.fill_range = counted
atexit.register(lambda: sys.stderr.write(f"drawn {sum(drawn)} in {len(drawn)} calls\\n"))
run(main)
"""


def test_run_that_begins_draws_each_initial_weight_once_and_later_none(tmp_path: Path) -> None:
    def drawn(steps: int) -> list[int]:
        words = options(tmp_path, checkpoint__every=1, train__steps=steps)[2:]
        job = run_ranks(2, ["-c", COUNTS_DRAWN, *words], timeout=90).ended()
        assert ("going on from" in job.said) == (steps > 1), job
        return [int(numel) for numel in re.findall(r"drawn (\d+) in", job.stderr)]

    first = drawn(1)
    blocks = PRESETS["gpt-micro"].layers * 12 * PRESETS["gpt-micro"].hidden ** 2
    assert sum(first) > blocks, "more than the weight matrices of the blocks"
    assert max(first) < 0.6 * sum(first), "each rank about its half"
    assert drawn(2) == [0, 0]
