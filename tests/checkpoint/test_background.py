"""Saves in the background: training goes on, the checkpoint is of the step it was asked at, errors reach all ranks."""

from __future__ import annotations

import logging
import threading

import pytest

from hpczero.checkpoint import checkpoints as module
from hpczero.checkpoint.buddy import MemoryCopies
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.writing import PosixWriter
from hpczero.errors import CheckpointNotWritten
from hpczero.options.config import CheckpointOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.run.results.folder import RunFolder
from hpczero.run.stopping import Wish
from tests.checkpoint.folders import steps
from tests.checkpoint.programs import Program, held_save, state_digests
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


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
        world.check(path is not None and path.name == "step-000000002", path)
        world.check(checkpoints.check() is None, "it is told of once")
    assert path is not None
    world.check(state_digests(at_once) == state_digests(path))


def test_next_save_waits_for_the_one_in_flight(world: World, program: Program) -> None:
    with program.checkpoints(world.folder, background=True, keep=2) as checkpoints:
        for _ in range(4):
            program.train(1)
            checkpoints.save(program.step, program.extra())
    world.check(steps(world.folder) == [4, 3], steps(world.folder))


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
    world.check(steps(world.folder) == [3], steps(world.folder))
    world.check(not list(world.folder.glob(".tmp*")))


def test_without_thread_support_it_is_written_at_once(
    world: World, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_run_in_background", lambda: False)
    with program.checkpoints(world.folder, background=True) as checkpoints:
        path = checkpoints.save(0, program.extra())
        world.check(not checkpoints.busy and path.name == "step-000000000")


# --- of a run: what becomes of one save is not the next one's business


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


STEPS = 6


@pytest.mark.parametrize(
    ("step", "wish", "fails", "there"),
    [
        pytest.param(2, Wish.STOP, True, [3], id="a stop saves its own step"),
        pytest.param(2, Wish.STOP, False, [3, 2], id="one that ends while the next one begins"),
        pytest.param(STEPS - 1, Wish.NOTHING, True, [], id="in flight after the last step"),
    ],
)
def test_save_in_flight_is_told_of_under_its_own_step_and_does_not_end_the_run(
    world: World,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
    wish: Wish,
    fails: bool,
    there: list[int],
) -> None:
    """A save of ``step`` is held while the next step is done, which ends with ``wish``."""
    caplog.set_level(logging.INFO, "hpczero")
    writes = Writes(monkeypatch, fail=world.rank == 0)
    config = RunConfig(
        run=RunOptions(name="r", folder=str(world.folder)),
        train=TrainOptions(steps=STEPS),
        checkpoint=CheckpointOptions(every=0, background=True),
    )
    place = RunFolder.of(config.run)
    lock = Lock(place.checkpoints)
    world.on_root(lock.acquire)
    copies = MemoryCopies(str(world.folder), place.path, world.topology, every=0)
    with RunCheckpoints(config, place, program.model, lock=lock, copies=copies) as checkpoints:
        program.train(step)
        writes.next_fails = fails
        writes.may_end.clear()
        checkpoints.after_step(step, {}, Wish.SAVE)
        program.train(1)
        threading.Timer(0.2, writes.may_end.set).start()
        checkpoints.after_step(step + 1, {}, wish)
    lock.release()
    world.check(steps(place.checkpoints) == there, steps(place.checkpoints))
    said = [f"step-{number:09d}\n" for number in there]
    said += [f"step {step}: no checkpoint: ", "the disk has gone"] if fails else []
    on_root = world.rank == 0
    world.check(all((words in caplog.text) is on_root for words in said), caplog.text)
    world.check(caplog.text.count("no checkpoint: ") == (fails and on_root), caplog.text)
    world.check(fails or checkpoints.save_s >= 0.2, f"{checkpoints.save_s} s")
