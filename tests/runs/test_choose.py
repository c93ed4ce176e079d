"""Where a run begins, as its folder and its options say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint import Loaded
from hpczero.errors import ConfigError
from hpczero.models import GPTConfig
from hpczero.options.config import ResumeOptions, RunConfig, RunOptions
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.resume import began_at, check, choose


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


def test_run_with_checkpoints_of_its_own_does_not_need_where_it_once_began(
    tmp_path: Path, away: str
) -> None:
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


# --- what was loaded, held against this run

MODEL = GPTConfig(vocab_size=257, context=16, layers=2, hidden=32, heads=4)


def check_model(earlier: object, now: GPTConfig = MODEL) -> None:
    """What is left of a checkpoint when its run's folder is lost, or somebody names it by its path."""
    said = {"data": "d", "global_batch": 8, "seed": 0}
    extra = said if earlier is None else {**said, "model": earlier}
    found = Loaded(Path("step-000000005"), 5, json.loads(json.dumps(extra)), 2)
    check(found, {**said, "model": dataclasses.asdict(now)}, 10, own=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 2}, "model.heads was 2 and is 4"),
        ({"context": 8}, "model.context was 8 and is 16"),
        ({"dropout": 0.1}, "model.dropout was 0.1 and is 0.0"),
        ({"positions": "rotary"}, "model.positions was 'rotary' and is 'learned'"),
    ],
)
def test_checkpoint_of_another_model_of_the_same_shapes_is_refused_wherever_it_lies(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"step-000000005: belongs to a run of .*: {said}[.]"):
        check_model(dataclasses.asdict(dataclasses.replace(MODEL, **changes)))


def test_checkpoint_that_says_nothing_of_its_model_or_less_than_today_is_accepted() -> None:
    whole = dataclasses.asdict(MODEL)
    for said in (None, {}, whole, {k: v for k, v in whole.items() if k != "dropout"}):
        check_model(said)
    again = dataclasses.replace(MODEL, checkpoint_activations=True)  # gives the same numbers
    check_model(whole, again)
