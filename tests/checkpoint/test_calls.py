"""Calls of save and load at the wrong moment, or with what a checkpoint cannot be called: named errors on all ranks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints
from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import CheckpointError, ConfigError, StepError
from tests.checkpoint.damage import values_of
from tests.checkpoint.programs import held_save
from tests.helpers.small_models import MLP, adamw, mlp_steps, same
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_load_inside_gathered_is_refused(
    world: World, stage: Any, transport: str, modifier_rank: int | None
) -> None:
    """The values at the end of the block would take the place of the loaded ones."""
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        sharding = hpczero.sharding(model)
        checkpoints = Checkpoints(world.folder, model)
        checkpoints.save(1)
        mlp_steps(model, optimizer, world.rank)
        before = values_of(sharding)
        with hpczero.gathered(model, modifier_rank=modifier_rank):
            for load in (checkpoints.load, lambda: hpczero.checkpoint.load(world.folder, model)):
                world.raises(StepError, "inside `with hpczero.gathered", load)
        world.check(same(before, values_of(sharding)))
        world.check(hpczero.checkpoint.load(world.folder, model).step == 1)
        checkpoints.close()


def test_load_waits_for_the_save_in_flight(world: World, model: MLP) -> None:
    go_on, at = held_save()
    with Checkpoints(world.folder, model, background=True, at=at) as checkpoints:
        go_on.set()
        checkpoints.save(2)
        checkpoints.wait()
        go_on.clear()
        checkpoints.save(3)
        threading.Timer(0.3, go_on.set).start()
        found = checkpoints.load()
        world.check(found is not None and found.step == 3, str(found))
        world.check(not checkpoints.busy)


@pytest.mark.parametrize(
    "step", [-1, 1.5, "7", None, True, 2**63, pytest.param(10**5000, id="many digits")]
)
def test_steps_that_a_checkpoint_cannot_have_are_refused(
    world: World, model: MLP, step: Any
) -> None:
    got = "a number of very many digits" if step == 10**5000 else repr(step)
    said = f"got step {got}, expected a whole number, 0 to 9223372036854775807"
    world.raises(ConfigError, said, hpczero.checkpoint.save, world.folder, model, step=step)
    world.check(not list(world.folder.iterdir()))


def test_steps_that_differ_between_ranks_are_refused_and_the_largest_is_kept(
    world: World, model: MLP
) -> None:
    save = partial(hpczero.checkpoint.save, world.folder, model)
    said = r"ranks \[1\] are at another step"
    world.raises(ConfigError, said, save, step=3 + world.rank)
    save(step=2**63 - 1)
    world.check(hpczero.checkpoint.load(world.folder, model).step == 2**63 - 1)


@pytest.mark.parametrize("keep", ["2", 1.5, True, 0])
def test_counts_that_cannot_be_are_refused(world: World, model: MLP, keep: Any) -> None:
    with pytest.raises(ConfigError, match=r"keep: got .*, expected a whole number, at least"):
        Checkpoints(world.folder, model, keep=keep)


def test_directory_that_cannot_be_is_named(world: World, model: MLP) -> None:
    path = f"{world.folder}/a\0b"
    for call in (
        partial(hpczero.checkpoint.save, path, model, step=1),
        partial(hpczero.checkpoint.load, path, model),
        partial(Checkpoints(world.folder, model).load, path),
    ):
        with pytest.raises(ConfigError, match=r"directory: got .*a null character"):
            call()


@pytest.mark.parametrize(("parameter", "buffer"), [("a\ud800", "b"), ("a", "b\udfff")])
def test_name_of_half_a_character_is_refused(world: World, parameter: str, buffer: str) -> None:
    model = nn.Module()
    model.register_parameter(parameter, nn.Parameter(torch.zeros(3)))
    model.register_buffer(buffer, torch.zeros(3))
    with world.zeroified(model, None):
        said = r"the (parameter 'a\\ud800'|buffer 'b\\udfff').* half a character"
        save = hpczero.checkpoint.save
        world.raises(CheckpointError, said, save, world.folder, model, step=1)
        world.check(not list(world.folder.glob("step-*")))


def save_and_raise(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints:
        checkpoints.save(step)
        raise RuntimeError("of the user's")


def test_loop_that_catches_an_exception_with_a_save_in_flight_goes_on_saving(
    world: World, model: MLP
) -> None:
    go_on, at = held_save()
    with pytest.raises(RuntimeError, match="of the user's"):
        save_and_raise(Checkpoints(world.folder, model, background=True, at=at), 1)
    threading.Timer(0.3, go_on.set).start()
    found = hpczero.checkpoint.load(world.folder, model)  # waits for it
    world.check(found.step == 1, str(found))
    path = hpczero.checkpoint.save(world.folder, model, step=2)
    names = sorted(p.name for p in world.folder.glob("step-*"))
    world.check(names == ["step-000000001", path.name], str(names))
    world.comm.Barrier()
    world.check(not list(world.folder.glob(".lock-*")))


def test_lock_of_the_caller_outlasts_what_is_still_written_and_goes_with_it(
    world: World, model: MLP
) -> None:
    (go_on, at), lock = held_save(), Lock(world.folder)
    world.on_root(lock.acquire)
    with pytest.raises(RuntimeError, match="of the user's"):
        save_and_raise(Checkpoints(world.folder, model, background=True, at=at, lock=lock), 1)
    lock.release()
    world.check(lock.held == (world.rank == 0), "it is being written")
    go_on.set()
    hpczero.checkpoint.save(world.folder, model, step=2)
    world.check(not lock.held)


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_go_on_after_an_exception_in_their_block(
    world: World, model: MLP, background: bool
) -> None:
    checkpoints = Checkpoints(world.folder, model, background=background)
    for step in (1, 2):
        with pytest.raises(RuntimeError, match="of the user's"):
            save_and_raise(checkpoints, step)
    checkpoints.save(3)
    checkpoints.close()
    world.comm.Barrier()
    world.check(not list(world.folder.glob(".lock-*")))
