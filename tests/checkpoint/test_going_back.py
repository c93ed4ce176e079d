"""Models that go back: the line that is left is kept apart, and what was just saved is there to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.checkpoint.disk.folder import LATEST, Folder, read_manifest
from hpczero.checkpoint.disk.format import STATE_FILE
from tests.checkpoint.programs import Program
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 2)
def test_save_of_an_earlier_step_returns_what_is_there_and_the_next_start_goes_on_from_it(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    for step in (10, 20):
        other = Program(topology)
        other.step = step
        other.save(folder, keep=3)
        other.close()
    program = Program(topology)
    path = program.save(folder, keep=1)
    parallel_assert(comm, path.is_dir() and read_manifest(path).step == 0, str(path))
    parallel_assert(comm, (folder / LATEST).read_text() == f"{path.name}\n")
    parallel_assert(comm, program.load(folder).step == 0)
    comm.Barrier()
    aside = sorted(p.name for p in folder.glob("aside-*/step-*"))
    parallel_assert(comm, aside == ["step-000000010", "step-000000020"], str(aside))
    program.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_model_that_goes_back_leaves_the_line_it_has_left(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    background: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(topology)
    with program.checkpoints(folder, keep=3) as checkpoints:
        for _ in range(3):
            program.train(2)
            checkpoints.save(program.step, program.extra())
        if comm.rank == 0:
            (folder / "best").symlink_to("step-000000002")
        comm.Barrier()
        checkpoints.load(folder / "best")
        program.step = 2
        parallel_assert(comm, len(Folder(folder).candidates()) == 3, "a load writes nothing")
    with program.checkpoints(folder, keep=2, background=background) as checkpoints:
        for _ in range(4):
            program.train(1)
            checkpoints.save(program.step, program.extra())
    comm.Barrier()
    steps = [manifest.step for _, manifest in Folder(folder).valid()]
    parallel_assert(comm, steps == [6, 5], str(steps))
    aside = sorted(p.name for p in folder.glob("aside-*/step-*"))
    parallel_assert(comm, aside == ["step-000000004", "step-000000006"], str(aside))
    told = caplog.text.count("set aside in")
    parallel_assert(comm, told == (1 if comm.rank == 0 else 0), caplog.text)
    program.close()


@pytest.mark.ranks(2)
def test_corrupt_newest_goes_aside_and_is_not_what_retention_keeps(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    program = Program(topology)
    for step in (10, 20):
        program.step = step
        program.save(folder)
    if comm.rank == 0:
        file = folder / "step-000000020" / STATE_FILE
        data = bytearray(file.read_bytes())
        data[-3000] ^= 1
        file.write_bytes(data)
    comm.Barrier()
    found = program.load(folder)
    program.step = found.step + 1
    path = program.save(folder, keep=1)
    parallel_assert(comm, path.is_dir() and path.name == "step-000000011", str(path))
    parallel_assert(comm, [p.name for p in Folder(folder).candidates()] == [path.name])
    program.close()


@pytest.mark.ranks(1)
def test_a_folder_that_nobody_keeps_small_may_hold_checkpoints_of_several_models(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    for step in (1, 2, 3, 3):
        program = Program(topology)
        program.step = step
        program.save(folder)
        program.close()
    parallel_assert(comm, [m.step for _, m in Folder(folder).valid()] == [3, 2, 1])
    parallel_assert(comm, len(list(folder.glob("aside-*/step-000000003"))) == 1)


@pytest.mark.ranks(2)
def test_copy_named_after_a_later_step_is_passed_over_unless_it_is_asked_for(
    comm: MPI.Intracomm, topology: Topology, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(topology)
    for step in (5, 8):
        program.step = step
        program.save(folder)
    copy = folder / "step-000000020"
    if comm.rank == 0:
        shutil.copytree(folder / "step-000000005", copy)
    comm.Barrier()
    parallel_assert(comm, program.load(folder).step == 8)
    parallel_assert(comm, program.load(copy).step == 5)
    told = "named after step 20 and holds step 5" in caplog.text
    parallel_assert(comm, told is (comm.rank == 0), caplog.text)
    program.close()


@pytest.mark.ranks(2)
def test_model_that_comes_from_a_link_in_a_folder_is_of_that_folders_line(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    program = Program(topology)
    for step in (5, 8):
        program.step = step
        program.save(folder)
    if comm.rank == 0:
        (folder / "elsewhere").mkdir()
        (folder / "step-000000008").rename(folder / "elsewhere" / "step-000000008")
        (folder / "step-000000008").symlink_to("elsewhere/step-000000008")
    comm.Barrier()
    program.load(folder)
    program.step = 9
    program.save(folder, keep=3)
    steps = [manifest.step for _, manifest in Folder(folder).valid()]
    parallel_assert(comm, steps == [9, 8, 5], str(steps))
    parallel_assert(comm, not list(folder.glob("aside-*")))
    program.close()
