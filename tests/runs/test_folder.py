"""Run folders under the training command: nobody's results are lost, and nobody writes where another is at work."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint.disk.folder import LATEST
from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import ConfigError
from hpczero.run.results.folder import RunFolder
from tests.helpers.mpirun import run_alone
from tests.helpers.runs import losses, options, steps, train


def content(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` that is no lock, with a digest of what it holds."""
    return {
        os.fspath(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(".lock-")
    }


@pytest.fixture
def runs(twelve: Path, tmp_path: Path) -> Path:
    shutil.copytree(twelve, tmp_path / "runs")
    return tmp_path / "runs"


# --- going back


def test_run_that_goes_back_keeps_what_it_leaves_and_the_next_start_follows(runs: Path) -> None:
    before = content(runs / "r")
    earlier = runs / "r" / "checkpoints" / "step-000000004"
    changes = {"train__learning_rate": 2e-3, "checkpoint__every": 2, "checkpoint__keep": 2}
    (runs / "r" / "STOP").touch()
    job = train(runs, 1, resume__from=earlier, train__steps=14, **changes).ended(75)
    # What is promised is there, and how to come back to it is said.
    assert "the same command with --resume.from auto goes on from there" in job.said, job
    assert steps(runs) == [5, 4]
    assert (runs / "r" / "checkpoints" / LATEST).read_text() == "step-000000005\n"
    assert job.said.count("set aside in") == 1, job
    (aside,) = (runs / "r" / "checkpoints").glob("aside-*")
    kept = content(aside)
    assert {name for name in kept if "step" in name} == {
        f"step-0000000{step}/{file}"
        for step in ("08", "12")
        for file in ("manifest.json", "state.h5")
    }
    for name in ("model.safetensors", "metrics.jsonl", "config.toml"):
        assert kept[name] == before[name]
    assert not (runs / "r" / "model.safetensors").exists()
    first = losses(runs)
    job = train(runs, 1, train__steps=14, **changes).ended()
    assert "step-000000005: step 5" in job.said, job
    assert losses(runs)[:5] == first
    assert len(losses(runs)) == 14
    assert steps(runs) == [14, 12]
    assert content(aside) == kept


def test_run_that_begins_elsewhere_keeps_its_own_apart_and_goes_on_after_a_kill(runs: Path) -> None:
    shutil.move(runs / "default", runs / "other")
    before = content(runs / "other")
    changes = {"run__name": "other", "train__steps": 16, "checkpoint__every": 100}
    train(runs, 1, resume__from=runs / "r", **changes).ended()
    (aside,) = (runs / "other" / "checkpoints").glob("aside-*")
    assert (
        content(aside).items()
        >= {
            name.removeprefix("checkpoints/"): digest
            for name, digest in before.items()
            if LATEST not in name and name not in ("attempts.jsonl", "watch.html")
        }.items()
    )
    lines = (runs / "other" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [13, 14, 15, 16]
    # As if it had been killed before its first save.
    shutil.rmtree(runs / "other" / "checkpoints" / "step-000000016")
    (runs / "other" / "model.safetensors").unlink()
    job = train(runs, 1, **changes).ended()
    assert f"going on from {runs / 'r' / 'checkpoints' / 'step-000000012'}" in job.said, job
    assert steps(runs, "other") == [16]
    assert len(list((runs / "other" / "checkpoints").glob("aside-*"))) == 1


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("series", ["", "s"])
def test_finished_run_that_began_elsewhere_is_kept_when_it_begins_there_again(
    runs: Path, series: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_SERIES", series)
    changes = {"run__name": "new", "checkpoint__every": 0, "resume__from": runs / "r"}
    train(runs, 1, train__steps=14, **changes).ended()
    before = content(runs / "new")
    job = train(runs, 1, train__steps=14 + more, **changes).ended()
    if series and not more:
        assert "nothing left to do" in job.said, job
        return
    (aside,) = (runs / "new" / "checkpoints").glob("aside-*")
    kept = content(aside)
    for name in ("model.safetensors", "metrics.jsonl", "config.toml"):
        assert kept[name] == before[name]
    assert (runs / "new" / "model.safetensors").exists()


def test_requeued_job_begins_where_its_first_start_was_told_to(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_SERIES", "s")
    changes = {"run__name": "new", "train__steps": 14, "checkpoint__every": 0}
    train(runs, 1, resume__from=runs / "r", **changes).ended()
    # As if it had been killed before its end.
    (runs / "new" / "model.safetensors").unlink()
    attempts = runs / "new" / "attempts.jsonl"
    lines = attempts.read_text().splitlines(keepends=True)
    attempts.write_text("".join(line for line in lines if '"end"' not in line))
    job = train(runs, 1, **changes).ended()
    assert f"going on from {runs / 'r' / 'checkpoints' / 'step-000000012'}" in job.said, job


# --- nothing is wiped


def test_second_run_called_default_moves_the_first_aside_and_says_so(runs: Path) -> None:
    (runs / "default" / "attempts.jsonl").write_text(
        '{"event": "start", "series": "s", "committed": 0}\n'
        '{"event": "start", "series": "", "committed": 0}\n'
    )
    before = content(runs / "default")
    job = train(runs, 1, run__name="default", train__steps=3, checkpoint__every=4).ended()
    (moved,) = runs.glob("default-*Z")
    assert f"held an earlier run, which is now {moved}" in job.said, job
    assert content(moved).items() >= before.items()
    assert not list((moved / "checkpoints").glob(".lock*"))
    assert steps(runs, "default") == [3]
    assert len(losses(runs, "default")) == 3
    starts = (runs / "default" / "attempts.jsonl").read_text()
    assert starts.count('"start", "series": "s"') == 1
    assert starts.count('"start"') == 2, "that of the earlier run outside of a series stays with it"
    # It is a run like any other: it goes on under its new name.
    job = train(runs, 1, run__name=moved.name, train__steps=13, checkpoint__every=4).ended()
    assert "step-000000012: step 12" in job.said, job


@pytest.mark.parametrize("changes", [{}, {"resume__from": "never"}])
@pytest.mark.parametrize("lost", ["config", "all but the model", "options"])
def test_run_whose_options_are_lost_is_refused_not_emptied(
    runs: Path, changes: dict[str, Any], lost: str
) -> None:
    config = runs / "r" / "config.toml"
    if lost == "options":
        config.write_bytes(b"\0" * 100)
    else:
        config.unlink()
    if lost == "all but the model":
        shutil.rmtree(runs / "r" / "checkpoints")
    before = content(runs / "r")
    job = train(runs, 1, train__steps=14, **changes).ended(78)
    assert f"{runs / 'r'}" in job.said, job
    assert "--run.overwrite true" in job.said, job
    assert content(runs / "r") == before


def test_run_whose_options_are_lost_goes_on_where_it_is_told_to(runs: Path) -> None:
    (runs / "r" / "config.toml").write_bytes(b"[" * 100_000)
    job = train(runs, 1, train__steps=14, resume__from=runs / "r" / "checkpoints").ended()
    assert "the options of before are not known" in job.said, job
    assert len(losses(runs)) == 14


# --- one at a time


@pytest.mark.parametrize(
    "changes",
    [
        {"run__name": "r", "train__steps": 14},
        {"run__name": "r", "run__overwrite": "true"},
        {"run__name": "default"},
        {"run__name": "new"},
    ],
)
def test_second_job_of_a_name_is_refused_before_it_changes_anything(
    runs: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_SERIES", "s")  # in which every start is noted
    folder = runs / str(changes["run__name"])
    with Lock(folder / "checkpoints") as lock:
        before = content(runs)
        job = train(runs, 1, **changes).ended(78)
        assert f"held by process {os.getpid()} on" in job.stderr, job
        assert content(runs) == before
        lock.check()


STANDS_STILL = """
import sys
from hpczero.errors import run
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.train import main
begin = RunCheckpoints.begin
def taken_over_meanwhile(self, source, identity):
    start = begin(self, source, identity)
    for lock in self._folder.checkpoints.glob(".lock-*"):
        lock.unlink()
    return start
RunCheckpoints.begin = taken_over_meanwhile
run(main)
"""


@pytest.mark.parametrize("changes", [{"run__overwrite": "true"}, {"train__steps": 14}])
def test_job_that_stood_still_touches_nothing_of_the_one_that_took_over(
    runs: Path, changes: dict[str, Any]
) -> None:
    before = content(runs / "r")
    _, _, *given = options(runs, **changes)
    job = run_alone(["-c", STANDS_STILL, *given], timeout=90).ended(78)
    assert "was taken away" in job.stderr, job
    assert content(runs / "r") == before


DIES_AFTER_SAVE = """
import os, signal, sys
from hpczero.errors import run
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.train import main
after_step = RunCheckpoints.after_step
def dies(self, done, *rest, **more):
    after_step(self, done, *rest, **more)
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
RunCheckpoints.after_step = dies
run(main)
"""


def test_kill_between_a_commit_and_the_next_line_loses_no_line(tmp_path: Path) -> None:
    _, _, *given = options(tmp_path, train__steps=6, checkpoint__every=4)
    job = run_alone(["-c", DIES_AFTER_SAVE, *given], timeout=90)
    assert job.returncode not in (0, 75, 78), job
    assert steps(tmp_path) == [4]
    assert len(losses(tmp_path)) == 4
    train(tmp_path, 1, train__steps=6, checkpoint__every=4).ended()
    assert len(losses(tmp_path)) == 6
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    saving_ms = [json.loads(line)["checkpoint_ms"] for line in lines]
    # The line of step 4 was on disk before its save began; the others depend on the machine.
    assert saving_ms[3] == 0.0
    assert saving_ms[5] > 1.0


# --- files that are not what they should be


def test_damaged_records_do_not_stop_a_run_that_has_sound_checkpoints(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_SERIES", "s")
    attempts, metrics = (runs / "r" / name for name in ("attempts.jsonl", "metrics.jsonl"))
    attempts.write_text(
        '{"event": "start", "series": "s", "committed": 0}\n'
        '{"event": "begin", "series": "s", "step": 0}\n'
    )
    for file in (attempts, metrics):
        first, rest = file.read_bytes().split(b"\n", 1)
        file.write_bytes(first[: len(first) // 2] + b"\0" * 100 + rest)
    data = metrics.read_bytes()
    job = train(runs, 1, train__steps=14).ended()
    assert "metrics.jsonl: line(s) 1" in job.said, job
    assert [path.read_bytes() for path in (runs / "r").glob("metrics.jsonl.damaged-*")] == [data]
    assert steps(runs)[0] == 14


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "config.toml"])
def test_fifo_where_a_file_is_expected_is_named_and_not_waited_for(
    runs: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_SERIES", "s")
    place = runs / "r" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    job = train(runs, 1, train__steps=14).ended(78)
    assert f"{place}: is a FIFO, expected a file" in job.said, job


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "attempts.jsonl", "config.toml", "model.safetensors", "loss.png"]
)
def test_whatever_is_no_file_where_one_is_expected_is_refused(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    place = tmp_path / name
    folder.check()
    for kind, make in {
        "FIFO": lambda: os.mkfifo(place),
        "device": lambda: place.symlink_to("/dev/zero"),
        "directory": place.mkdir,
    }.items():
        make()
        with pytest.raises(ConfigError, match=f"{name}: is a {kind}, expected a file"):
            folder.check()
        place.rmdir() if kind == "directory" else place.unlink()
    folder.checkpoints.touch()
    with pytest.raises(ConfigError, match="checkpoints: is a file, expected a directory"):
        folder.check()
