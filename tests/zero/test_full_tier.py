"""A tier on a real disk that runs full: one error on all ranks that names file and place, then the bits of memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hpczero.errors import TierError
from hpczero.tier import DiskTier
from tests.helpers.small_disk import fill, free_nbytes, small_disk
from tests.helpers.world import World
from tests.zero.whole_training import INPUTS, Training

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

DISK_NBYTES = 8 * 2**20
PLACE = r"disk tier: .*/hpczero-tier-[^ ]+ .*"


@pytest.fixture
def disk(comm, folder: Path) -> Iterator[Path]:
    """A folder on a small disk, the same on all ranks."""
    with ExitStack() as stack:
        mounted = None
        if comm.rank == 0:
            mounted = stack.enter_context(small_disk(folder, DISK_NBYTES))
        path = comm.bcast(mounted)
        if path is None:
            pytest.skip("cannot mount a file system: needs root and mkfs.ext4")
        yield path
        comm.Barrier()


@contextmanager
def full(world: World, disk: Path, left_nbytes: int) -> Iterator[None]:
    """Hardly any room inside. Collective."""
    world.comm.Barrier()
    filler = fill(disk, left_nbytes) if world.rank == 0 else None
    world.comm.Barrier()
    try:
        yield
    finally:
        world.comm.Barrier()
        if filler is not None:
            filler.unlink()
        world.comm.Barrier()


def test_a_disk_without_room_for_the_state_keeps_nothing(world: World, folder, disk):
    memory = Training(world.topology, folder / "memory")
    expected = memory.step()
    memory.close()
    tier = partial(DiskTier, disk)
    with full(world, disk, 2**17):
        before = world.comm.bcast(free_nbytes(disk))
        pattern = rf"{PLACE}no room for [0-9,]+ bytes beyond [0-9,]+: .*ENOSPC|rank\(s\).*ENOSPC"
        world.raises(TierError, "ENOSPC", lambda: Training(world.topology, folder, tier=tier))
        world.raises(TierError, pattern, lambda: Training(world.topology, folder, tier=tier))
        world.comm.Barrier()
        world.check(world.comm.bcast(free_nbytes(disk)) == before)
        world.check(not list(disk.iterdir()))
    training = Training(world.topology, folder, tier=tier)
    world.check(training.step() == expected)
    training.close()


def test_a_disk_that_runs_full_under_inputs_is_one_error_of_the_step(world: World, folder, disk):
    memory = Training(world.topology, folder / "memory")
    expected = memory.step()
    memory.close()
    inputs = DiskTier(disk, blocks=INPUTS["buffers"], block_nbytes=INPUTS["window"])
    training = Training(world.topology, folder, tier=partial(DiskTier, folder), inputs=inputs)
    with full(world, disk, 0):
        world.raises(TierError, rf"{PLACE}ENOSPC|rank\(s\).*ENOSPC", training.step)
    training.optimizer.zero_grad()
    world.check(training.step() == expected, "other bits after the error")
    training.close()


@contextmanager
def short_files(*, here: bool, nbytes: int) -> Iterator[None]:
    """This process may write no byte of any file from ``nbytes`` on, where ``here``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("nbytes", [4096, 2**15, 2**16])
def test_a_write_that_the_system_refuses_is_one_error(world: World, folder, nbytes):
    training = Training(world.topology, folder, tier=partial(DiskTier, folder))
    training.step(save=True)
    expected = training.step()
    training.load()
    last = world.size - 1
    with short_files(here=world.rank == last, nbytes=nbytes):
        pattern = rf"{PLACE}(EFBIG|came short).*got [0-9,]+ of [0-9,]+ bytes"
        said = world.raises(TierError, pattern, training.step)
    world.check(world.size == 1 or f"rank(s) {last}" in said, said)
    training.optimizer.zero_grad()
    training.load()
    world.check(training.step() == expected, "other bits after the error")
    training.close()
