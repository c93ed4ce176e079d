"""Models that go back: the line that is left is kept apart, and what was just saved is there to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.checkpoint.disk.folder import LATEST, Folder, read_manifest
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.programs import Program, program_of
from tests.helpers.parallel import on_root, parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in Folder(folder).valid()]


@pytest.mark.ranks(1, 2)
def test_save_of_an_earlier_step_returns_what_is_there_and_the_next_start_goes_on_from_it(
    comm: MPI.Intracomm, program: Program, folder: Path
) -> None:
    for step in (10, 20):
        with program_of(comm, comm.size) as other:
            other.step = step
            other.save(folder, keep=3)
    path = program.save(folder, keep=1)
    parallel_assert(comm, path.is_dir() and read_manifest(path).step == 0, str(path))
    parallel_assert(comm, (folder / LATEST).read_text() == f"{path.name}\n")
    parallel_assert(comm, program.load(folder).step == 0)
    comm.Barrier()
    aside = sorted(p.name for p in folder.glob("aside-*/step-*"))
    parallel_assert(comm, aside == ["step-000000010", "step-000000020"], str(aside))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_model_that_goes_back_leaves_the_line_it_has_left(
    comm: MPI.Intracomm,
    program: Program,
    folder: Path,
    background: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with program.checkpoints(folder, keep=3) as checkpoints:
        for _ in range(3):
            program.train(2)
            checkpoints.save(program.step, program.extra())
        on_root(comm, (folder / "best").symlink_to, "step-000000002")
        checkpoints.load(folder / "best")
        program.step = 2
        parallel_assert(comm, len(Folder(folder).candidates()) == 3, "a load writes nothing")
    with program.checkpoints(folder, keep=2, background=background) as checkpoints:
        for _ in range(4):
            program.train(1)
            checkpoints.save(program.step, program.extra())
    comm.Barrier()
    parallel_assert(comm, steps(folder) == [6, 5], str(steps(folder)))
    aside = sorted(p.name for p in folder.glob("aside-*/step-*"))
    parallel_assert(comm, aside == ["step-000000004", "step-000000006"], str(aside))
    told = caplog.text.count("set aside in")
    parallel_assert(comm, told == (1 if comm.rank == 0 else 0), caplog.text)


def save_at(program: Program, folder: Path, *numbers: int) -> Path:
    """Checkpoints of these steps; the last of them. Collective."""
    for number in numbers:
        program.step = number
        path = program.save(folder)
    return path


@pytest.mark.ranks(2)
def test_corrupt_newest_goes_aside_and_is_not_what_retention_keeps(
    comm: MPI.Intracomm, program: Program, folder: Path
) -> None:
    path = save_at(program, folder, 10, 20)
    on_root(comm, flip_in, path, datasets(path)[0], 0)
    found = program.load(folder)
    program.step = found.step + 1
    path = program.save(folder, keep=1)
    parallel_assert(comm, path.is_dir() and path.name == "step-000000011", str(path))
    parallel_assert(comm, [p.name for p in Folder(folder).candidates()] == [path.name])


@pytest.mark.ranks(1)
def test_a_folder_that_nobody_keeps_small_may_hold_checkpoints_of_several_models(
    comm: MPI.Intracomm, folder: Path
) -> None:
    for step in (1, 2, 3, 3):
        with program_of(comm, comm.size) as program:
            save_at(program, folder, step)
    parallel_assert(comm, steps(folder) == [3, 2, 1])
    parallel_assert(comm, len(list(folder.glob("aside-*/step-000000003"))) == 1)


@pytest.mark.ranks(2)
def test_copy_named_after_a_later_step_is_passed_over_unless_it_is_asked_for(
    comm: MPI.Intracomm, program: Program, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_at(program, folder, 5, 8)
    copy = folder / "step-000000020"
    on_root(comm, shutil.copytree, folder / "step-000000005", copy)
    parallel_assert(comm, program.load(folder).step == 8)
    parallel_assert(comm, program.load(copy).step == 5)
    told = "named after step 20 and holds step 5" in caplog.text
    parallel_assert(comm, told is (comm.rank == 0), caplog.text)


@pytest.mark.ranks(2)
def test_model_that_comes_from_a_link_in_a_folder_is_of_that_folders_line(
    comm: MPI.Intracomm, program: Program, folder: Path
) -> None:
    path, elsewhere = save_at(program, folder, 5, 8), folder / "elsewhere"
    if comm.rank == 0:
        elsewhere.mkdir()
        path.rename(elsewhere / path.name)
        path.symlink_to(f"elsewhere/{path.name}")
    comm.Barrier()
    program.load(folder)
    program.step = 9
    program.save(folder, keep=3)
    parallel_assert(comm, steps(folder) == [9, 8, 5], str(steps(folder)))
    parallel_assert(comm, not list(folder.glob("aside-*")))
