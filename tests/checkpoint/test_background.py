"""Saves in the background: training goes on, the checkpoint is of the step it was asked at, errors reach all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.checkpoint import checkpoints as module
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.writing import PosixWriter
from hpczero.errors import CheckpointNotWritten
from hpczero.options.config import CheckpointOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.run.results.folder import RunFolder
from hpczero.run.stopping import Wish
from tests.checkpoint.programs import Program, held_save, state_digests
from tests.helpers.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in Folder(folder).valid()]


def test_training_goes_on_and_the_checkpoint_is_of_its_step(world: World, program: Program) -> None:
    go_on, at = held_save()
    program.train(2)
    at_once = program.save(world.folder / "at once")
    with program.checkpoints(world.folder / "later", background=True, at=at) as checkpoints:
        checkpoints.save(program.step, program.extra())
        world.check(checkpoints.busy)
        program.train(2)  # while rank 0 is held in the middle of the save
        world.check(checkpoints.check() is None)
        go_on.set()
        path = checkpoints.wait()
        world.check(path is not None and path.name == "step-000000002", str(path))
        world.check(checkpoints.check() is None, "it is told of once")
    assert path is not None
    world.check(state_digests(at_once) == state_digests(path))


def test_next_save_waits_for_the_one_in_flight(world: World, program: Program) -> None:
    with program.checkpoints(world.folder, background=True, keep=2) as checkpoints:
        for _ in range(4):
            program.train(1)
            checkpoints.save(program.step, program.extra())
    world.check(steps(world.folder) == [4, 3], str(steps(world.folder)))


def test_failed_write_comes_up_at_the_next_step_on_every_rank(
    world: World, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch, fail=world.rank == world.size - 1)
    with program.checkpoints(world.folder, background=True) as checkpoints:
        writes.next_fails = True
        program.train(1)
        checkpoints.save(program.step, program.extra())
        program.train(1)
        world.raises(CheckpointNotWritten, "the disk has gone", checkpoints.wait)
        program.train(1)
        checkpoints.save(program.step, program.extra())
        path = checkpoints.wait()
        world.check(path is not None and path.name == "step-000000003")
    world.check(steps(world.folder) == [3], str(steps(world.folder)))
    world.check(not list(world.folder.glob(".tmp*")))


def test_without_thread_support_it_is_written_at_once(
    world: World, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_run_in_background", lambda: False)
    with program.checkpoints(world.folder, background=True) as checkpoints:
        path = checkpoints.save(0, program.extra())
        world.check(not checkpoints.busy and path.name == "step-000000000")


# --- of a run: what becomes of one save is not the next one's business


STEPS = 6


class Writes:
    """Writes of checkpoints that are held, or fail where ``fail``, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: bool) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.next_fails = False
        close = PosixWriter.close

        def close_or_fail(writer: PosixWriter) -> None:
            fails, self.next_fails = self.next_fails, False
            assert self.may_end.wait(60)
            if fails and fail:
                raise OSError(5, "the disk has gone")
            close(writer)

        monkeypatch.setattr(PosixWriter, "close", close_or_fail)


@contextmanager
def run_of(program: Program, folder: Path, every: int) -> Iterator[RunCheckpoints]:
    config = RunConfig(
        run=RunOptions(name="r", folder=str(folder)),
        train=TrainOptions(steps=STEPS),
        checkpoint=CheckpointOptions(every=every, background=True),
    )
    place = RunFolder.of(config.run)
    lock = Lock(place.checkpoints)
    if program.topology.is_root:
        lock.acquire()
    with RunCheckpoints(config, place, program.model, lock=lock) as checkpoints:
        yield checkpoints
    lock.release()


def held_then_asked(
    program: Program, folder: Path, writes: Writes, *, broken: bool
) -> RunCheckpoints:
    """A save of step 2 is still in flight when the run is asked to stop after step 3."""
    with run_of(program, folder, every=2) as checkpoints:
        program.train(2)
        writes.next_fails = broken
        writes.may_end.clear()
        checkpoints.after_step(2, {}, Wish.NOTHING)
        program.train(1)
        threading.Timer(0.2, writes.may_end.set).start()
        checkpoints.after_step(3, {}, Wish.STOP)
        return checkpoints


@pytest.fixture
def writes(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch, fail=comm.rank == 0)


def test_run_that_stops_saves_its_step_although_the_save_before_fails(
    world: World, program: Program, writes: Writes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hpczero")
    held_then_asked(program, world.folder, writes, broken=True)
    found = steps(world.folder / "r" / "checkpoints")
    world.check(found == [3], str(found))
    told = "step 2: no checkpoint: " in caplog.text and "the disk has gone" in caplog.text
    world.check(told is (world.rank == 0), caplog.text)
    world.check("step 3: no checkpoint" not in caplog.text, caplog.text)


def test_save_that_ends_while_the_next_one_begins_is_told_and_measured(
    world: World, program: Program, writes: Writes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpczero")
    checkpoints = held_then_asked(program, world.folder, writes, broken=False)
    found = steps(world.folder / "r" / "checkpoints")
    world.check(found == [3, 2], str(found))
    for name in ("step-000000002", "step-000000003"):
        told = f"{name}\n" in caplog.text
        world.check(told is (world.rank == 0), caplog.text)
    world.check(checkpoints.save_s >= 0.2, f"{checkpoints.save_s} s")


def test_save_in_flight_after_the_last_step_that_fails_does_not_end_the_run(
    world: World, program: Program, writes: Writes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hpczero")
    with run_of(program, world.folder, every=0) as checkpoints:
        program.train(STEPS - 1)
        writes.next_fails = True
        writes.may_end.clear()
        checkpoints.after_step(STEPS - 1, {}, Wish.SAVE)
        program.train(1)
        threading.Timer(0.2, writes.may_end.set).start()
        checkpoints.after_step(STEPS, {}, Wish.NOTHING)
        # Leaving the block finishes what is in flight, whatever is required.
    told = f"step {STEPS - 1}: no checkpoint: " in caplog.text
    world.check(told is (world.rank == 0), caplog.text)
