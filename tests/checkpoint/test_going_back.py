"""Models that go back: the line that is left is kept apart, and what was just saved is there to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpczero.checkpoint.disk.folder import LATEST, Folder, read_manifest
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.folders import steps
from tests.checkpoint.programs import Program, program_of
from tests.helpers.world import World

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 2)
def test_save_of_an_earlier_step_returns_what_is_there_and_the_next_start_goes_on_from_it(
    world: World, program: Program
) -> None:
    for step in (10, 20):
        with program_of(world.comm, world.size) as other:
            other.step = step
            other.save(world.folder, keep=3)
    path = program.save(world.folder, keep=1)
    world.check(path.is_dir() and read_manifest(path).step == 0, str(path))
    world.check((world.folder / LATEST).read_text() == f"{path.name}\n")
    world.check(program.load(world.folder).step == 0)
    world.comm.Barrier()
    aside = sorted(p.name for p in world.folder.glob("aside-*/step-*"))
    world.check(aside == ["step-000000010", "step-000000020"], str(aside))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_model_that_goes_back_leaves_the_line_it_has_left(
    world: World, program: Program, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with program.checkpoints(world.folder, keep=3) as checkpoints:
        for _ in range(3):
            program.train(2)
            checkpoints.save(program.step, program.extra())
        world.on_root((world.folder / "best").symlink_to, "step-000000002")
        checkpoints.load(world.folder / "best")
        program.step = 2
        world.check(len(Folder(world.folder).candidates()) == 3, "a load writes nothing")
    with program.checkpoints(world.folder, keep=2, background=background) as checkpoints:
        for _ in range(4):
            program.train(1)
            checkpoints.save(program.step, program.extra())
    world.comm.Barrier()
    world.check(steps(world.folder) == [6, 5], str(steps(world.folder)))
    aside = sorted(p.name for p in world.folder.glob("aside-*/step-*"))
    world.check(aside == ["step-000000004", "step-000000006"], str(aside))
    told = caplog.text.count("set aside in")
    world.check(told == (1 if world.rank == 0 else 0), caplog.text)


def save_at(program: Program, folder: Path, *numbers: int) -> Path:
    """Checkpoints of these steps; the last of them. Collective."""
    for number in numbers:
        program.step = number
        path = program.save(folder)
    return path


@pytest.mark.ranks(2)
def test_corrupt_newest_goes_aside_and_is_not_what_retention_keeps(
    world: World, program: Program
) -> None:
    path = save_at(program, world.folder, 10, 20)
    world.on_root(flip_in, path, datasets(path)[0], 0)
    found = program.load(world.folder)
    program.step = found.step + 1
    path = program.save(world.folder, keep=1)
    world.check(path.is_dir() and path.name == "step-000000011", str(path))
    world.check([p.name for p in Folder(world.folder).candidates()] == [path.name])


@pytest.mark.ranks(1)
def test_a_folder_that_nobody_keeps_small_may_hold_checkpoints_of_several_models(
    world: World,
) -> None:
    for step in (1, 2, 3, 3):
        with program_of(world.comm, world.size) as program:
            save_at(program, world.folder, step)
    world.check(steps(world.folder) == [3, 2, 1])
    world.check(len(list(world.folder.glob("aside-*/step-000000003"))) == 1)


@pytest.mark.ranks(2)
def test_copy_named_after_a_later_step_is_passed_over_unless_it_is_asked_for(
    world: World, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    save_at(program, world.folder, 5, 8)
    copy = world.folder / "step-000000020"
    world.on_root(shutil.copytree, world.folder / "step-000000005", copy)
    world.check(program.load(world.folder).step == 8)
    world.check(program.load(copy).step == 5)
    told = "named after step 20 and holds step 5" in caplog.text
    world.check(told is (world.rank == 0), caplog.text)


@pytest.mark.ranks(2)
def test_model_that_comes_from_a_link_in_a_folder_is_of_that_folders_line(
    world: World, program: Program
) -> None:
    path, elsewhere = save_at(program, world.folder, 5, 8), world.folder / "elsewhere"
    if world.rank == 0:
        elsewhere.mkdir()
        path.rename(elsewhere / path.name)
        path.symlink_to(f"elsewhere/{path.name}")
    world.comm.Barrier()
    program.load(world.folder)
    program.step = 9
    program.save(world.folder, keep=3)
    world.check(steps(world.folder) == [9, 8, 5], str(steps(world.folder)))
    world.check(not list(world.folder.glob("aside-*")))
