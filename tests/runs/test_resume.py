"""Runs that are stopped, killed and taken up again, by the training command on real MPI jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import STATE_FILE
from tests.checkpoint.programs import state_digests
from tests.helpers.forkserver import BASE, LAUNCHER
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT, run_alone
from tests.helpers.processes import end_family, launch_environment
from tests.helpers.runs import losses, options, steps, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    job = train(folder)
    assert job.returncode == 0, job
    assert steps(folder) == [24, 20, 15]
    return folder, losses(folder)


@pytest.mark.worth("resume with the same bits")
def test_stopped_run_exits_75_and_goes_on_with_the_same_bits(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "STOP").touch()
    job = train(tmp_path)
    assert job.returncode == 75, job
    assert "stopped after step 1, as asked" in job.stdout + job.stderr, job
    assert not (tmp_path / "r" / "STOP").exists()
    assert not (tmp_path / "r" / "model.safetensors").exists()
    assert steps(tmp_path) == [1]
    job = train(tmp_path)
    assert job.returncode == 0, job
    assert "step-000000001: step 1, saved by 2 rank(s)" in job.stdout + job.stderr, job
    assert losses(tmp_path) == whole[1]
    ours, theirs = (f / "r" / "model.safetensors" for f in (tmp_path, whole[0]))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_stop_that_is_heard_in_the_last_step_finds_a_finished_run(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "STOP").touch()
    job = train(tmp_path, ranks=1, train__steps=1)
    assert job.returncode == 0, job
    assert (tmp_path / "r" / "model.safetensors").exists()


def test_other_ranks_and_stage_go_on_with_the_next_sample(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "STOP").touch()
    assert train(tmp_path, ranks=3, parallel__stage=1).returncode == 75
    job = train(tmp_path, ranks=1)
    assert job.returncode == 0, job
    np.testing.assert_allclose(losses(tmp_path), whole[1], rtol=1e-6)


def start(folder: Path, **changes: Any) -> subprocess.Popen[bytes]:
    environment = launch_environment(**BASE)
    command = (LAUNCHER, "2", sys.executable, *options(folder, **changes))
    with (folder / "stdout").open("w") as output:
        return subprocess.Popen(
            forkserver.forked(command, environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    path = folder / "r" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.01)
    raise AssertionError((folder / "stdout").read_text())


def rank_pids(folder: Path) -> list[int]:
    """Processes that train into ``folder``: the ranks, not their launcher."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0] == sys.executable.encode() and str(folder).encode() in words:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_to_one_rank_saves_once_and_stops_all(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, train__steps=100_000, checkpoint__every=0)
    try:
        wait_for_step(tmp_path, 3, process)
        victims = rank_pids(tmp_path)
        assert len(victims) == 2, victims
        os.kill(victims[-1], number)
        os.kill(victims[-1], number)  # impatient
        assert process.wait(60) == 75, (tmp_path / "stdout").read_text()
    finally:
        end_family(process.pid)
    (step,) = steps(tmp_path)
    assert step == len(losses(tmp_path)) >= 3


def test_save_file_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "SAVE").touch()
    job = train(tmp_path, checkpoint__every=0)
    assert job.returncode == 0, job
    assert steps(tmp_path) == [1]
    assert not (tmp_path / "r" / "SAVE").exists()


def test_saves_in_the_background_are_the_same_checkpoints(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    job = train(tmp_path, checkpoint__background="true")
    assert job.returncode == 0, job
    assert losses(tmp_path) == whole[1]
    for ours, theirs in zip(
        Folder(tmp_path / "r" / "checkpoints").valid(),
        Folder(whole[0] / "r" / "checkpoints").valid(),
        strict=True,
    ):
        digests = [state_digests(path) for path, _ in (ours, theirs)]
        assert ours[1].step == theirs[1].step
        assert digests[0] == digests[1]


def damage(path: Path) -> None:
    with (path / STATE_FILE).open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 5, 10 and 12 that was not finished."""
    folder = tmp_path_factory.mktemp("twelve")
    job = train(folder, train__steps=12)
    assert job.returncode == 0, job
    assert steps(folder) == [12, 10, 5]
    (folder / "r" / "model.safetensors").unlink()
    return folder


@pytest.fixture
def stopped(twelve: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(twelve, tmp_path / "runs")
    return tmp_path / "runs"


def test_corrupt_newest_is_named_and_the_older_one_used(stopped: Path) -> None:
    newest, _, _ = Folder(stopped / "r" / "checkpoints").candidates()
    damage(newest)
    job = train(stopped, train__steps=14)
    assert job.returncode == 0, job
    said = job.stdout + job.stderr
    assert f"{newest}: corrupt: elements" in said, job
    assert re.search(r"going on from the older .*step-000000010", said), job
    assert len(losses(stopped)) == 14


def test_nothing_sound_left_is_65_and_nothing_is_deleted(stopped: Path) -> None:
    found = Folder(stopped / "r" / "checkpoints").candidates()
    for path in found:
        damage(path)
    job = train(stopped, train__steps=14)
    assert job.returncode == 65, job
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
    job = train(stopped, **{"train__steps": 14, **changes})
    assert job.returncode == 78, job
    assert said in job.stderr, job
    assert (stopped / "r" / "metrics.jsonl").read_bytes() == before


def test_finished_run_goes_on_only_if_asked_for_more(whole: tuple[Path, list[float]]) -> None:
    folder, _ = whole
    job = train(folder)
    assert job.returncode == 78, job
    assert "holds a finished run of 24 steps" in job.stderr, job


def test_model_that_is_newer_than_any_checkpoint_is_kept_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "SAVE").touch()
    changes = {"checkpoint__every": 0, "train__steps": 3}
    assert train(tmp_path, ranks=1, **changes).returncode == 0
    assert steps(tmp_path) == [1]
    model = (tmp_path / "r" / "model.safetensors").read_bytes()
    job = train(tmp_path, ranks=1, **{**changes, "train__steps": 4})
    assert job.returncode == 0, job
    assert "step-000000001: step 1" in job.stdout + job.stderr, job
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
    job = train(tmp_path)
    assert job.returncode == 0, job
    assert "going on from" in job.stdout + job.stderr, job
    assert weights.read_bytes() == expected
    assert losses(tmp_path) == whole[1]


def test_checkpoint_of_another_run_with_all_steps_behind_it_leaves_nothing_to_do(
    tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    job = train(tmp_path, resume__from=whole[0] / "r")
    assert job.returncode == 78, job
    assert "has 24 steps behind it, and train.steps is 24" in job.stderr, job


def test_other_data_are_refused(stopped: Path) -> None:
    text = stopped / "text.txt"
    text.write_text("another text, quite short but long enough for two splits. " * 2000)
    job = train(stopped, train__steps=14, data__path=text, data__cache=stopped / "tokens")
    assert job.returncode == 78, job
    assert "data was" in job.stderr, job


def test_another_run_may_begin_where_this_one_is(stopped: Path) -> None:
    job = train(
        stopped, train__steps=14, run__name="other", resume__from=stopped / "r" / "checkpoints"
    )
    assert job.returncode == 0, job
    first = json.loads((stopped / "other" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 13


def test_options_of_a_run_that_replaced_another_go_on_with_it_when_they_are_given_again(
    stopped: Path,
) -> None:
    job = train(stopped, ranks=1, train__steps=3, run__overwrite="true")
    assert job.returncode == 0, job
    kept = stopped / "r" / "config.toml"
    job = run_alone(["-m", "hpczero.train", kept, "--train.steps", "5"], timeout=90)
    assert job.returncode == 0, job
    assert "step-000000003: step 3" in job.stdout + job.stderr, job
    assert steps(stopped) == [5, 3]


def test_never_starts_anew_and_overwrite_too(stopped: Path) -> None:
    job = train(stopped, train__steps=3, run__overwrite="true")
    assert job.returncode == 0, job
    assert steps(stopped) == [3]
    assert len(losses(stopped)) == 3
