"""A run that saves in the background: what becomes of one save is not the next one's business."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.writing import PosixWriter
from hpczero.options.config import CheckpointOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.run.results.folder import RunFolder
from hpczero.run.stopping import Wish
from tests.checkpoint.programs import Program, first_ranks
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STEPS = 6


class Saves:
    """Writes of checkpoints that are held, or fail, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.next_fails = False
        close = PosixWriter.close

        def close_or_fail(writer: PosixWriter) -> None:
            fails, self.next_fails = self.next_fails, False
            assert self.may_end.wait(60)
            if fails and rank == 0:
                raise OSError(5, "the disk has gone")
            close(writer)

        monkeypatch.setattr(PosixWriter, "close", close_or_fail)


@contextmanager
def run_of(
    comm: MPI.Intracomm, folder: Path, every: int
) -> Iterator[tuple[Program, RunCheckpoints]]:
    config = RunConfig(
        run=RunOptions(name="r", folder=str(folder)),
        train=TrainOptions(steps=STEPS),
        checkpoint=CheckpointOptions(every=every, background=True),
    )
    place = RunFolder.of(config.run)
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program, lock = Program(topology), Lock(place.checkpoints)
        if topology.is_root:
            lock.acquire()
        with RunCheckpoints(config, place, program.model, lock=lock) as checkpoints:
            yield program, checkpoints
        lock.release()
        program.close()


def saved(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in Folder(folder / "r" / "checkpoints").valid()]


def held_then_asked(
    comm: MPI.Intracomm, folder: Path, saves: Saves, *, broken: bool
) -> RunCheckpoints:
    """A save of step 2 is still in flight when the run is asked to stop after step 3."""
    with run_of(comm, folder, every=2) as (program, checkpoints):
        program.train(2)
        saves.next_fails = broken
        saves.may_end.clear()
        checkpoints.after_step(2, {}, Wish.NOTHING)
        program.train(1)
        threading.Timer(0.2, saves.may_end.set).start()
        checkpoints.after_step(3, {}, Wish.STOP)
        return checkpoints


def test_run_that_stops_saves_its_step_although_the_save_before_fails(
    comm: MPI.Intracomm,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "hpczero")
    held_then_asked(comm, folder, Saves(monkeypatch, comm.rank), broken=True)
    parallel_assert(comm, saved(folder) == [3], str(saved(folder)))
    told = "step 2: no checkpoint: " in caplog.text and "the disk has gone" in caplog.text
    parallel_assert(comm, told is (comm.rank == 0), caplog.text)
    parallel_assert(comm, "step 3: no checkpoint" not in caplog.text, caplog.text)


def test_save_that_ends_while_the_next_one_begins_is_told_and_measured(
    comm: MPI.Intracomm,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "hpczero")
    checkpoints = held_then_asked(comm, folder, Saves(monkeypatch, comm.rank), broken=False)
    parallel_assert(comm, saved(folder) == [3, 2], str(saved(folder)))
    for name in ("step-000000002", "step-000000003"):
        told = f"{name}\n" in caplog.text
        parallel_assert(comm, told is (comm.rank == 0), caplog.text)
    parallel_assert(comm, checkpoints.save_s >= 0.2, f"{checkpoints.save_s} s")


def test_save_in_flight_after_the_last_step_that_fails_does_not_end_the_run(
    comm: MPI.Intracomm,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "hpczero")
    saves = Saves(monkeypatch, comm.rank)
    with run_of(comm, folder, every=0) as (program, checkpoints):
        program.train(STEPS - 1)
        saves.next_fails = True
        saves.may_end.clear()
        checkpoints.after_step(STEPS - 1, {}, Wish.SAVE)
        program.train(1)
        threading.Timer(0.2, saves.may_end.set).start()
        checkpoints.after_step(STEPS, {}, Wish.NOTHING)
        # Leaving the block finishes what is in flight, whatever is required.
    told = f"step {STEPS - 1}: no checkpoint: " in caplog.text
    parallel_assert(comm, told is (comm.rank == 0), caplog.text)
