"""Starts that follow one another: which go on, which are one too many, and which have nothing left to do."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero.errors import ConfigError, StepError
from hpczero.options.config import ResumeOptions, RunConfig, RunOptions, TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.attempts import Attempts, read_attempts
from hpczero.run.starting.resume import began_at, choose
from tests.runs.test_metrics import DAMAGE

SERIES = Environment(series="s", job="7")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "r")


def start(folder: RunFolder, environment: Environment = SERIES) -> Attempts:
    attempts = Attempts(folder, environment)
    attempts.start(ranks=2, host="host1")
    return attempts


def commit(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / f"step-{step:09}").mkdir(parents=True)


def test_fifth_start_without_a_new_checkpoint_is_refused_with_the_step(folder: RunFolder) -> None:
    for _ in range(4):  # the first, and three restarts
        start(folder)
    said = r"3 restarts in a row committed no checkpoint after step 0"
    with pytest.raises(ConfigError, match=said):
        start(folder)
    with pytest.raises(ConfigError):  # and again: a refused start does not count
        start(folder)
    start(folder, Environment(series="another", job="8"))  # somebody has looked into it


def test_every_new_checkpoint_starts_the_count_anew(folder: RunFolder) -> None:
    for step in range(1, 4):
        for _ in range(3):
            start(folder)
        commit(folder, step)
    start(folder)


def test_series_whose_starts_all_stop_at_once_ends_after_three_restarts(folder: RunFolder) -> None:

    def run(steps: int, code: int = 75) -> None:
        done = folder.newest_step()
        attempts = start(folder)
        attempts.begin(done)
        attempts.end(done + steps, code)
        commit(folder, done + steps)

    for steps in (1, 2, 2, 3, 1, 2):  # three steps are an advance
        run(steps)
    run(1)
    with pytest.raises(ConfigError, match=r"3 restarts in a row were asked to stop before .*TIME="):
        start(folder)
    start(folder, Environment(series="another", job="8"))


def test_run_that_ended_early_leaves_nothing_to_do_to_its_series(folder: RunFolder) -> None:
    start(folder).end(7, 0, "the held-out loss did not fall")
    assert start(folder).finished(100)
    assert '"why": "the held-out loss did not fall"' in folder.attempts.read_text()


def test_series_always_stopped_while_it_tokenizes_is_told_time_is_short(folder: RunFolder) -> None:
    for _ in range(4):
        start(folder).end(0, 75)
    with pytest.raises(ConfigError, match=r"too little time: 3 restarts .*hpczero.data prepare"):
        start(folder)


def test_start_that_is_killed_is_none_that_was_stopped_at_once(folder: RunFolder) -> None:
    for step in range(1, 9):  # each saves, and then crashes
        start(folder).begin(step - 1)
        commit(folder, step)
    start(folder)


def test_outside_of_a_series_starts_are_written_for_people_and_not_counted(
    folder: RunFolder,
) -> None:
    start(folder, Environment(job="7"))
    assert not folder.path.exists(), "nobody's folder before it begins"
    for _ in range(9):
        attempts = start(folder, Environment(job="7"))
        attempts.begin(0)
        attempts.end(3, 0)
    events = [event["event"] for event in read_attempts(folder.attempts)]
    assert events == 9 * ["start", "begin", "end"]
    assert not Attempts(folder, Environment()).finished(3)
    assert not Attempts(folder, SERIES).finished(3)


def test_failure_of_one_rank_and_warnings_are_in_the_record_and_count_for_nothing(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    root, other = start(folder), Attempts(folder, Environment(), is_root=False)
    root.begin(0)
    other.begin(0)
    with root.told(0):
        root.step = other.step = 5
        for _ in range(3):
            logging.getLogger("hpczero.runs").warning("disk is nearly full")
        with pytest.raises(StepError), other.told(3):
            raise StepError("loss is nan")
    found = read_attempts(folder.attempts)
    assert [event["event"] for event in found] == ["start", "begin", "note", "end"]
    assert found[2] | {"kind": "warning", "text": "disk is nearly full", "step": 5} == found[2]
    told = {"step": 5, "code": 1, "rank": 3, "error": "StepError: loss is nan"}
    assert found[3] | told == found[3]
    assert start(folder).settle(RunConfig()).run.overwrite, "it has saved nothing"


def test_restart_goes_on_from_its_own_checkpoint_whatever_options_say(folder: RunFolder) -> None:
    asked = RunConfig(run=RunOptions(overwrite=True), resume=ResumeOptions(from_="elsewhere"))
    commit(folder, 5)  # of an earlier run, which is to be overwritten
    first = start(folder)
    assert first.settle(asked) == asked
    assert start(folder).settle(asked) == asked  # the first start has not come to its first step
    first.begin(0)
    again = start(folder).settle(asked)
    assert (again.run.overwrite, again.resume.from_) == (False, "auto")
    assert start(folder, Environment(series="another")).settle(asked) == asked


def test_restart_before_any_save_may_replace_what_the_first_start_left(folder: RunFolder) -> None:
    asked = RunConfig(resume=ResumeOptions(from_="elsewhere"))
    start(folder).begin(0)
    again = start(folder).settle(asked)
    assert again.run.overwrite
    assert again.resume == asked.resume
    assert dataclasses.replace(again, run=asked.run) == asked


def test_restart_goes_on_from_copies_in_memory_which_count_as_an_advance(
    folder: RunFolder,
) -> None:
    asked = RunConfig(run=RunOptions(overwrite=True), resume=ResumeOptions(from_="elsewhere"))
    start(folder).begin(0)
    for step in range(2, 12, 2):  # none of them comes to a checkpoint
        attempts = Attempts(folder, SERIES)
        attempts.start(ranks=2, host="host1", in_memory=step)
        again = attempts.settle(asked, in_memory=step)
        assert (again.run.overwrite, again.resume.from_) == (False, "auto")
        attempts.begin(step, in_memory=True)
    # These are lost with the nodes, and nobody is to look for them.
    again = start(folder).settle(asked)
    assert again.run.overwrite
    assert again.resume == asked.resume


@pytest.mark.parametrize("asked", ["auto", "never", "other"])
def test_restart_before_the_first_checkpoint_begins_where_the_first_start_did(
    folder: RunFolder, asked: str
) -> None:
    start(folder).begin(12)
    folder.go_on(RunConfig(resume=ResumeOptions(from_="elsewhere")))
    again = start(folder).settle(RunConfig(resume=ResumeOptions(from_=asked)))
    assert (again.run.overwrite, again.resume.from_) == (False, "elsewhere")
    folder.config.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        start(folder).settle(RunConfig())


@pytest.mark.parametrize("asked", [False, True])
def test_options_that_a_run_keeps_never_replace_it_when_they_are_given_again(
    tmp_path: Path, asked: bool
) -> None:
    """Of a job that was requeued before its first save, and of a user who asked for it once."""
    config = RunConfig(run=RunOptions(name="r", folder=str(tmp_path), overwrite=asked))
    folder = RunFolder.of(config.run)
    start(folder).begin(0)
    again = start(folder).settle(config)
    assert again.run.overwrite
    folder.create(again)
    assert load_toml(folder.config, RunConfig).run.overwrite is False
    folder.go_on(again)
    assert load_toml(folder.config, RunConfig).run.overwrite is False


def test_finished_run_leaves_nothing_to_do_unless_more_steps_are_asked(folder: RunFolder) -> None:
    start(folder).end(40, 75)
    assert not Attempts(folder, SERIES).finished(40)
    start(folder).end(50, 0)
    assert Attempts(folder, SERIES).finished(50)
    assert not Attempts(folder, SERIES).finished(60)
    assert not Attempts(folder, Environment(series="another")).finished(50)


def test_start_killed_between_its_results_and_its_last_line_has_finished(folder: RunFolder) -> None:
    config = RunConfig(train=TrainOptions(steps=40))
    first = start(folder)
    folder.create(config)
    first.begin(0)
    assert not Attempts(folder, SERIES).finished(40), "no results"
    folder.weights.touch()
    assert Attempts(folder, SERIES).finished(40)
    assert not Attempts(folder, SERIES).finished(60)
    assert not Attempts(folder, Environment(series="another")).finished(40)


def test_half_a_line_of_a_killed_job_costs_that_line_alone(folder: RunFolder) -> None:
    start(folder).begin(0)
    with folder.attempts.open("a") as file:
        file.write('{"event": "en')
    start(folder)
    lines = folder.attempts.read_text().splitlines()
    assert [json.loads(lines[i])["event"] for i in (0, 1, 3)] == ["start", "begin", "start"]


@pytest.mark.parametrize("damage", [*DAMAGE, b'{"event": "start"}', b'{"event": []}'])
def test_damaged_line_costs_that_line_alone_and_is_told(
    folder: RunFolder, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    start(folder).begin(0)
    data = folder.attempts.read_bytes()
    folder.attempts.write_bytes(damage + b"\n" + b"\0" * 7 + data)
    attempts = Attempts(folder, SERIES)
    told = "attempts.jsonl: 1 line(s) cannot be read, the first is 1" in caplog.text
    assert told is bool(damage.strip(b"\0"))
    commit(folder, 1)
    assert attempts.settle(RunConfig(run=RunOptions(overwrite=True))).run.overwrite is False


# --- what was committed and is gone


def stopped(folder: RunFolder) -> None:
    """The first start was asked to stop after step 7."""
    first = start(folder)
    first.begin(0)
    first.end(7, 75)


def killed_after_a_save(folder: RunFolder) -> None:
    start(folder).begin(0)
    commit(folder, 7)
    start(folder).begin(7)
    shutil.rmtree(folder.checkpoints)


def killed_after_a_save_and_refused_since(folder: RunFolder) -> None:
    start(folder).begin(0)
    commit(folder, 7)
    start(folder)
    shutil.rmtree(folder.checkpoints)


def taken_up_from_its_own(folder: RunFolder) -> None:
    commit(folder, 7)
    start(folder).begin(7)
    folder.go_on(RunConfig())
    shutil.rmtree(folder.checkpoints)


def begun_elsewhere_and_stopped(folder: RunFolder) -> None:
    first = start(folder)
    first.begin(3)
    folder.go_on(RunConfig(resume=ResumeOptions(from_="elsewhere")))
    first.end(7, 75)


@pytest.mark.parametrize(
    "before",
    [
        stopped,
        killed_after_a_save,
        killed_after_a_save_and_refused_since,
        taken_up_from_its_own,
        begun_elsewhere_and_stopped,
    ],
)
def test_restart_whose_checkpoints_are_gone_is_refused_and_changes_nothing(
    folder: RunFolder, before: Callable[[RunFolder], None]
) -> None:
    before(folder)
    folder.metrics.write_text("{}\n")
    again = start(folder)
    said = rf"{folder.checkpoints}: .*step 7, .*nothing is there.*{folder.attempts}"
    with pytest.raises(ConfigError, match=said):
        again.settle(RunConfig(run=RunOptions(overwrite=True)))
    assert folder.metrics.read_text() == "{}\n"
    start(folder, Environment(series="another")).settle(RunConfig())
    commit(folder, 7)  # mounted again
    assert start(folder).settle(RunConfig()).resume.from_ == "auto"


def test_series_that_has_committed_nothing_of_its_own_may_begin_anew(folder: RunFolder) -> None:
    commit(folder, 9)  # of an earlier run, which was overwritten
    start(folder).begin(0)
    shutil.rmtree(folder.checkpoints)
    first = start(folder)
    first.begin(0)
    first.end(2, 1)  # ended by an error
    assert start(folder).settle(RunConfig()).run.overwrite


# --- where a run begins, as its folder and its options say


@pytest.fixture
def away(tmp_path: Path) -> str:
    """As on a file system that has gone: nobody can say what is there."""
    (tmp_path / "away").symlink_to("a" * 300)
    return str(tmp_path / "away")


def begun(folder: Path, source: str) -> tuple[RunConfig, RunFolder]:
    """A run that began at ``source``, and its options now."""
    config = RunConfig(run=RunOptions(name="r", folder=str(folder)))
    run = RunFolder.of(config.run)
    run.create(RunConfig(run=config.run, resume=ResumeOptions(from_=source)))
    return config, run


def test_run_with_checkpoints_of_its_own_needs_no_beginning(tmp_path: Path, away: str) -> None:
    config, run = begun(tmp_path, away)
    (run.checkpoints / "step-000000005").mkdir(parents=True)
    assert choose(config, run) == run.checkpoints


def test_run_without_checkpoints_that_began_where_nobody_can_look_is_not_begun_anew(
    tmp_path: Path, away: str
) -> None:
    config, run = begun(tmp_path, away)
    with pytest.raises(ConfigError, match=r"resume.from: .* cannot be looked at \(File name too"):
        choose(config, run)
    assert not began_at(Path(away), run)


def test_place_to_begin_that_nobody_can_look_at_is_named(tmp_path: Path, away: str) -> None:
    run = RunOptions(name="r", folder=str(tmp_path))
    for source, why in ((away, "cannot be looked at"), ("/nowhere", "does not exist")):
        config = RunConfig(run=run, resume=ResumeOptions(from_=source))
        with pytest.raises(ConfigError, match=why):
            choose(config, RunFolder.of(run))
