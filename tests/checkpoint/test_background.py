"""Saves in the background: training goes on, the checkpoint is of the step it was asked at, errors reach all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.checkpoint import checkpoints as module
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.writing import PosixWriter
from hpczero.errors import CheckpointNotWritten
from tests.checkpoint.programs import Program, first_ranks, state_digests
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def test_training_goes_on_and_the_checkpoint_is_of_its_step(
    comm: MPI.Intracomm, folder: Path
) -> None:
    go_on = threading.Event()

    def at(name: str) -> None:
        if name == "created":
            assert go_on.wait(60)

    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        program.train(2)
        program.save(folder / "at once")
        with program.checkpoints(folder / "later", background=True, at=at) as checkpoints:
            checkpoints.save(program.step, program.extra())
            parallel_assert(comm, checkpoints.busy)
            program.train(2)  # while rank 0 is held in the middle of the save
            parallel_assert(comm, checkpoints.check() is None)
            go_on.set()
            path = checkpoints.wait()
            parallel_assert(comm, path is not None and path.name == "step-000000002", str(path))
            parallel_assert(comm, checkpoints.check() is None, "it is told of once")
        program.close()
    found = [state_digests(folder / name / "step-000000002") for name in ("at once", "later")]
    parallel_assert(comm, found[0] == found[1])


def test_next_save_waits_for_the_one_in_flight(comm: MPI.Intracomm, folder: Path) -> None:
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        with program.checkpoints(folder, background=True, keep=2) as checkpoints:
            for _ in range(4):
                program.train(1)
                checkpoints.save(program.step, program.extra())
        program.close()
    steps = [manifest.step for _, manifest in Folder(folder).valid()]
    parallel_assert(comm, steps == [4, 3], str(steps))


def test_failed_write_comes_up_at_the_next_step_on_every_rank(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = PosixWriter.close

    def close_or_fail(writer: PosixWriter) -> None:
        if comm.rank == comm.size - 1 and broken:
            raise OSError(5, "the disk has gone")
        close(writer)

    broken = [True]
    monkeypatch.setattr(PosixWriter, "close", close_or_fail)
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        with program.checkpoints(folder, background=True) as checkpoints:
            program.train(1)
            checkpoints.save(program.step, program.extra())
            program.train(1)
            raises_on_all(comm, CheckpointNotWritten, "the disk has gone", checkpoints.wait)
            broken.clear()
            program.train(1)
            checkpoints.save(program.step, program.extra())
            path = checkpoints.wait()
            parallel_assert(comm, path is not None and path.name == "step-000000003")
        program.close()
    steps = [manifest.step for _, manifest in Folder(folder).valid()]
    parallel_assert(comm, steps == [3], str(steps))
    parallel_assert(comm, not list(folder.glob(".tmp*")))


def test_without_thread_support_it_is_written_at_once(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_run_in_background", lambda: False)
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        with program.checkpoints(folder, background=True) as checkpoints:
            path = checkpoints.save(0, program.extra())
            parallel_assert(comm, not checkpoints.busy and path.name == "step-000000000")
        program.close()
