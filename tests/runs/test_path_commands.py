"""``runs/NAME`` means the same everywhere: what a run's folder, its checkpoints and one of them are to each command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hpczero
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.foreign.exporting import export
from hpczero.errors import ConfigError
from tests.checkpoint.programs import Program
from tests.helpers.parallel import parallel_assert
from tests.runs.two_runs import call, damage, sample, step_path

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.limit(300)  # many starts of jobs each

KINDS: dict[str, Callable[[Path], Path]] = {
    "run": lambda run: run,
    "folder": lambda run: run / "checkpoints",
    "one": lambda run: run / "checkpoints" / "step-000000006",
    "link": lambda run: link_to(run),
}


def link_to(run: Path) -> Path:
    (run.parent / "link").symlink_to(run, target_is_directory=True)
    return run.parent / "link"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_path_is_listed_verified_and_exported(
    runs: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = KINDS[kind](runs / "r")
    expected = [6] if kind == "one" else [6, 4, 2]
    assert call("ls", path) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == expected
    assert call("verify", path) == 0
    assert capsys.readouterr().out.count(": sound, ") == len(expected)
    assert call("export", path, tmp_path / "out") == 0
    assert "of step 6 in " in capsys.readouterr().out
    damage(step_path(runs, 6))
    assert call("verify", path) == 2


def test_what_was_set_aside_is_listed_too(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = runs / "r" / "checkpoints"
    (checkpoints / "aside-20260101T000000Z").mkdir()
    step_path(runs, 6).rename(checkpoints / "aside-20260101T000000Z" / "step-000000006")
    assert call("ls", runs / "r") == 0
    first = capsys.readouterr().out
    assert call("ls", checkpoints) == 0
    assert capsys.readouterr().out == first
    assert [line.split()[0] for line in first.splitlines()] == ["step", "4", "2", "set", "6"]


@pytest.mark.parametrize("out", ["new", "old", "old/checkpoints", "new/step-000000007"])
def test_import_puts_a_checkpoint_where_every_command_finds_it(
    runs: Path, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export(runs / "r", tmp_path / "weights")
    (runs / "old" / "checkpoints").mkdir(parents=True)  # of a run that has not saved yet
    assert call("import", tmp_path / "weights", runs / out) == 0
    (step,) = [7] if "step" in out else [0]
    place = runs / "new" if "new" in out else runs / "old" / "checkpoints"
    assert [path.name for path in Folder(place).candidates()] == [f"step-{step:09d}"]
    assert f"{place}/step-{step:09d}: imported" in capsys.readouterr().out
    assert call("verify", runs / out.partition("/")[0]) == 0
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        call("import", tmp_path / "weights", runs / out)


def test_import_under_the_name_of_another_step_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the name of step 7, and step is 3; call it step-00"):
        call("import", runs / "o", tmp_path / "new" / "step-000000007", "--step", 3)


def test_where_nothing_is_it_is_said_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    (run / "checkpoints" / "aside-20260101T000000Z").mkdir(parents=True)
    (run / "config.toml").touch()
    cases = {
        run: f"looked for step-... in {run}/checkpoints, which holds aside-20260101T000000Z; {run} holds checkpoints, "
        f"config.toml; what was set aside has a path of its own, as {run}/checkpoints/aside-20260101T000000Z",
        run / "checkpoints" / "aside-20260101T000000Z": "looked for step-..., and it holds nothing",
        run / "config.toml": "it is a file",
        tmp_path / "runs" / "s": "it does not exist",
    }
    for path, expected in cases.items():
        for words in (("verify", path), ("export", path, tmp_path / "out")):
            with pytest.raises(ConfigError) as error:
                call(*words)
            assert f"{path}: no checkpoint there: {expected}; give the folder of a run" in str(
                error.value
            )
    job = sample(run, ranks=2).ended(78)
    assert f"{run}: no weights there, final ones or a checkpoint: {cases[run]}" in job.stderr, job
    assert f"`touch {run}/SAVE`" in job.stderr, job


def test_folder_of_an_own_loop_is_not_mistaken_for_that_of_a_run(runs: Path) -> None:
    """It holds checkpoints itself, and an empty folder of that name besides."""
    shutil.move(runs / "r" / "checkpoints", runs / "own")
    (runs / "own" / "checkpoints").mkdir()
    assert call("verify", runs / "own") == 0
    shutil.copytree(runs / "o" / "checkpoints", runs / "own" / "checkpoints", dirs_exist_ok=True)
    damage(runs / "own" / "checkpoints" / "step-000000006")
    assert call("verify", runs / "own") == 2


@pytest.mark.mpi
def test_folder_of_a_run_is_loaded_by_a_program_of_ones_own(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    program = Program(topology)
    program.train(2)
    program.save(folder / "r" / "checkpoints")
    comm.Barrier()
    found = hpczero.checkpoint.load(folder / "r", program.model)
    parallel_assert(comm, found.path == folder / "r" / "checkpoints" / "step-000000002")
    # The checkpoints of one's own are those of the very folder one saves to.
    with program.checkpoints(folder / "r") as checkpoints:
        parallel_assert(comm, checkpoints.load() is None)
        parallel_assert(comm, checkpoints.load(folder / "r") is not None)
    program.close()
