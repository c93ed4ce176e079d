"""Where a run begins, as its folder and its options say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.config import ResumeOptions, RunConfig, RunOptions
from hpczero.errors import ConfigError
from hpczero.resume import began_at, choose
from hpczero.runfolder import RunFolder


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
