"""Folders that cannot be written and disks that are full: an error on all ranks, and training can go on."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import h5py
import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk import h5file
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.foreign import exporting
from hpczero.errors import CheckpointNotWritten
from hpczero.job.team import Ranks
from tests.checkpoint.programs import Program
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

DISK_NBYTES = 3 * 2**20
LONG_S = 30.0
SERIAL = pytest.mark.skipif(not h5py.get_config().mpi, reason="h5py was built without MPI")
WRITERS = [pytest.param("mpio", marks=SERIAL), "posix"]


@pytest.fixture
def small_disk(world: World) -> Iterator[Path]:
    """A file system of ``DISK_NBYTES``, the same on all ranks."""
    mounted = False
    if world.rank == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(world.folder)]
        mounted = not subprocess.run(command, capture_output=True, check=False).returncode
    if not world.comm.bcast(mounted):
        pytest.skip("cannot mount a file system: needs root")
    yield world.folder
    world.on_root(subprocess.run, ["umount", "--lazy", world.folder], check=True)


def fill(disk: Path, free_nbytes: int) -> None:
    """Leave ``free_nbytes``."""
    system = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(system.f_bavail * system.f_frsize - free_nbytes))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/hpczero"])
def test_folder_that_cannot_be_written(
    world: World, program: Program, place: str, writer: str
) -> None:
    world.on_root((world.folder / "file").touch)
    save = partial(program.save, world.folder / place, writer=writer)
    said = world.raises(CheckpointNotWritten, r"cannot be written \(", save)
    world.check(str(world.folder / place) in said, said)
    program.train(1)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("free_nbytes", [0, 2**15])
def test_disk_that_is_full_before_the_save(
    world: World, program: Program, small_disk: Path, free_nbytes: int, writer: str
) -> None:
    save = partial(program.save, small_disk / "ckpt", writer=writer)
    first = save()
    program.train(1)
    world.on_root(fill, small_disk, free_nbytes)
    pattern = r"[KM]iB are free and the checkpoint needs" if free_nbytes else "No space left"
    world.raises(CheckpointNotWritten, pattern, save)
    program.train(1)
    world.check(left(small_disk / "ckpt") == ["LATEST", first.name])
    world.on_root((small_disk / "filler").unlink)
    world.check(all(verify(p).verdict is Verdict.SOUND for p in (first, save())))


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def large_model(topology: hpczero.Topology) -> nn.Module:
    """800 kB of parameters."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(100, 400))
    hpczero.zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1), topology=topology)
    return model


# Where the disk is full only once the save has begun: somebody else fills it too, or a quota is not seen by statvfs.
@pytest.mark.parametrize(
    ("free_nbytes", "reserved", "writer"),
    [
        pytest.param(3 * 2**12, True, "mpio", marks=SERIAL),  # the headers do not fit
        (3 * 2**12, True, "posix"),
        # the data do not, and the file system says so at once
        pytest.param(2**18, True, "mpio", marks=SERIAL),
        (2**18, True, "posix"),
        (2**18, False, "posix"),  # it can not, as on NFS: in mid-write
        (2**18, False, "auto"),  # where MPI-IO would hang or crash
    ],
)
def test_disk_that_runs_full_during_the_save(
    world: World,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_nbytes: int,
    reserved: bool,
    writer: str,
) -> None:
    model = large_model(world.topology)
    folder = small_disk / "ckpt"
    save = partial(hpczero.checkpoint.save, folder, model, writer=writer)
    first = save(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "check_room", lambda *_: None)
        if not reserved:
            patch.setattr(h5file, "_reserve", lambda _: False)
        world.on_root(fill, small_disk, free_nbytes)
        start, opened = time.monotonic(), []
        for _ in range(3):
            said = "older checkpoints are as they were"
            world.raises(CheckpointNotWritten, said, save, step=2)
            opened.append(open_files())
        world.check(time.monotonic() - start < LONG_S)
        world.check(writer == "mpio" or opened[-1] <= opened[0], f"{opened} files")
        world.check(left(folder) == ["LATEST", first.name], str(left(folder)))
        world.on_root((small_disk / "filler").unlink)
    world.check(hpczero.checkpoint.load(folder, model).step == 1)
    second = save(step=2)
    world.check(all(verify(p).verdict is Verdict.SOUND for p in (first, second)))
    hpczero.release(model)


@pytest.mark.parametrize("layout", ["hpczero", "dcp"])
def test_export_to_a_disk_that_runs_full(
    world: World,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: Literal["hpczero", "dcp"],
) -> None:
    model = large_model(world.topology)
    checkpoint = hpczero.checkpoint.save(small_disk / "ckpt", model, step=1)
    hpczero.release(model)
    monkeypatch.setattr(exporting, "_check_room", lambda *_: None)
    world.on_root(fill, small_disk, 2**18)
    write = partial(
        exporting.export,
        checkpoint,
        small_disk / "out",
        exporting.WeightsForm(layout=layout),
        team=Ranks(world.topology),
    )
    world.raises(CheckpointNotWritten, "No space left", write)
    world.check(left(small_disk) == ["ckpt", "filler"], str(left(small_disk)))


def open_files() -> int:
    gc.collect()  # what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))
