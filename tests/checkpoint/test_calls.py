"""Calls of save and load at the wrong moment, or with what a checkpoint cannot be called: named errors on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints
from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import CheckpointError, ConfigError, StepError
from tests.checkpoint.damage import values_of
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_load_inside_gathered_is_refused(
    comm: MPI.Intracomm,
    topology: hpczero.Topology,
    folder: Path,
    stage: Any,
    transport: str,
    modifier_rank: int | None,
) -> None:
    """The values at the end of the block would take the place of the loaded ones."""
    model = MLP()
    with zeroified(model, adamw(model), stage=stage, transport=transport, topology=topology) as s:
        checkpoints = Checkpoints(folder, model)
        checkpoints.save(1)
        mlp_backward(model, comm.rank)
        s.optimizer.step()  # type: ignore[union-attr]
        before = values_of(s)
        with hpczero.gathered(model, modifier_rank=modifier_rank):
            for load in (checkpoints.load, lambda: hpczero.checkpoint.load(folder, model)):
                raises_on_all(comm, StepError, "inside `with hpczero.gathered", load)
        after = values_of(s)
        parallel_assert(comm, all(map(torch.equal, before, after)))
        parallel_assert(comm, hpczero.checkpoint.load(folder, model).step == 1)
        checkpoints.close()


def held_save() -> tuple[threading.Event, Callable[[str], None]]:
    """An event, and what keeps a save from being written until it is set."""
    go_on = threading.Event()

    def at(name: str) -> None:
        if name == "created":
            assert go_on.wait(60)

    return go_on, at


def test_load_waits_for_the_save_in_flight(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    go_on, at = held_save()
    model = MLP()
    with (
        zeroified(model, adamw(model), topology=topology),
        Checkpoints(folder, model, background=True, at=at) as checkpoints,
    ):
        go_on.set()
        checkpoints.save(2)
        checkpoints.wait()
        go_on.clear()
        checkpoints.save(3)
        threading.Timer(0.3, go_on.set).start()
        found = checkpoints.load()
        parallel_assert(comm, found is not None and found.step == 3, str(found))
        parallel_assert(comm, not checkpoints.busy)


def test_steps_and_counts_that_a_checkpoint_cannot_have_are_refused(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    with zeroified(MLP(), None, topology=topology) as sharding:
        model = sharding.model
        for step in (2**63, 2**64, 10**5000):
            pattern = "expected a whole number, 0 to 9223372036854775807"
            save = partial(hpczero.checkpoint.save, folder, model, step=step)
            raises_on_all(comm, ConfigError, pattern, save)
        hpczero.checkpoint.save(folder, model, step=2**63 - 1)
        parallel_assert(comm, hpczero.checkpoint.load(folder, model).step == 2**63 - 1)
        for keep in ("2", 1.5, True, 0):
            with pytest.raises(
                ConfigError, match=r"keep: got .*, expected a whole number, at least"
            ):
                Checkpoints(folder, model, keep=keep)  # type: ignore[arg-type]


def test_directory_that_cannot_be_is_named(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    with zeroified(MLP(), None, topology=topology) as sharding:
        path = f"{folder}/a\0b"
        for call in (
            partial(hpczero.checkpoint.save, path, sharding.model, step=1),
            partial(hpczero.checkpoint.load, path, sharding.model),
            partial(Checkpoints(folder, sharding.model).load, path),
        ):
            with pytest.raises(ConfigError, match=r"directory: got .*a null character"):
                call()


class Named(nn.Module):
    """A parameter and a buffer of any name."""

    def __init__(self, parameter: str, buffer: str) -> None:
        super().__init__()
        self.register_parameter(parameter, nn.Parameter(torch.zeros(3)))
        self.register_buffer(buffer, torch.zeros(3))


@pytest.mark.parametrize(("parameter", "buffer"), [("a\ud800", "b"), ("a", "b\udfff")])
def test_name_of_half_a_character_is_refused(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path, parameter: str, buffer: str
) -> None:
    with zeroified(Named(parameter, buffer), None, topology=topology) as sharding:
        pattern = r"the (parameter 'a\\ud800'|buffer 'b\\udfff').* half a character"
        save = partial(hpczero.checkpoint.save, folder, sharding.model, step=1)
        raises_on_all(comm, CheckpointError, pattern, save)
        comm.Barrier()
        parallel_assert(comm, not list(folder.glob("step-*")))


def save_and_raise(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints:
        checkpoints.save(step)
        raise RuntimeError("of the user's")


def test_loop_that_catches_an_exception_with_a_save_in_flight_goes_on_saving(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    go_on, at = held_save()
    model = MLP()
    with zeroified(model, adamw(model), topology=topology):
        with pytest.raises(RuntimeError, match="of the user's"):
            save_and_raise(Checkpoints(folder, model, background=True, at=at), 1)
        threading.Timer(0.3, go_on.set).start()
        found = hpczero.checkpoint.load(folder, model)  # waits for it
        parallel_assert(comm, found.step == 1, str(found))
        path = hpczero.checkpoint.save(folder, model, step=2)
        names = sorted(p.name for p in folder.glob("step-*"))
        parallel_assert(comm, names == ["step-000000001", path.name], str(names))
        comm.Barrier()
        parallel_assert(comm, not list(folder.glob(".lock-*")))


def test_lock_of_the_caller_outlasts_what_is_still_written_and_goes_with_it(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    go_on, at = held_save()
    model, lock = MLP(), Lock(folder)
    with zeroified(model, adamw(model), topology=topology):
        if comm.rank == 0:
            lock.acquire()
        comm.Barrier()
        with pytest.raises(RuntimeError, match="of the user's"):
            save_and_raise(Checkpoints(folder, model, background=True, at=at, lock=lock), 1)
        lock.release()
        parallel_assert(comm, lock.held == (comm.rank == 0), "it is being written")
        go_on.set()
        hpczero.checkpoint.save(folder, model, step=2)
        parallel_assert(comm, not lock.held)


def test_checkpoints_go_on_after_an_exception_in_their_block(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), topology=topology):
        for background in (False, True):
            checkpoints = Checkpoints(folder, model, background=background)
            for step in (1, 2):
                with pytest.raises(RuntimeError, match="of the user's"):
                    save_and_raise(checkpoints, step)
            checkpoints.save(3)
            checkpoints.close()
        comm.Barrier()
        parallel_assert(comm, not list(folder.glob(".lock-*")))
