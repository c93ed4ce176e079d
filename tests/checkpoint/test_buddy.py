"""Copies in memory of two nodes each: whole after the loss of one, refused where damaged, gone where they fail."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

import hpczero
from hpczero.checkpoint import buddy
from hpczero.checkpoint.buddy import MemoryCopies
from hpczero.errors import CheckpointNotWritten, ConfigError, CorruptCheckpoint
from tests.checkpoint.programs import SLAB_NBYTES, Program
from tests.helpers.world import World, on_nodes

pytestmark = pytest.mark.mpi

RUN = Path("runs/mine")


def copies_of(world: World, folder: Path, *, every: int = 1) -> MemoryCopies:
    return MemoryCopies(str(folder), RUN, world.topology, every=every, slab_nbytes=SLAB_NBYTES)


def state(program: Program) -> Any:
    """Weights, optimizer and options, on rank 0."""
    return hpczero.full_state_dict(program.model), program.train(2)


def parts(folder: Path) -> list[Path]:
    """Of each node, and each copy."""
    return sorted(folder.glob("hpczero-*/*/node-*/step-*"))


def copied(world: World, folder: Path, *, steps: int = 3) -> Any:
    """Train, copy after ``steps``, and say what the state is then and how training goes on."""
    program = Program(world.topology)
    program.train(steps)
    copies_of(world, folder).save(hpczero.sharding(program.model), steps, program.extra())
    found = state(program)
    program.close()
    return found


def nodes_of(kind: str, size: int) -> list[int]:
    """Of each rank: a node of its own, or by turns on two."""
    return list(range(size)) if kind == "one each" else [rank % 2 for rank in range(size)]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["one each", "two nodes"])
@pytest.mark.parametrize("lost", [0, 1])
def test_whole_after_the_loss_of_one_node(world: World, folder: Path, kind: str, lost: int) -> None:
    with on_nodes(world.comm, nodes_of(kind, world.size)) as before:
        weights, losses = copied(before, folder)
    world.on_root(lambda: shutil.rmtree(parts(folder)[lost].parent))
    # The node that comes for the lost one holds nothing.
    with on_nodes(world.comm, nodes_of(kind, world.size)) as after:
        copies = copies_of(after, folder)
        copies.find()
        world.check(copies.step == 3, copies.step)
        program = Program(after.topology)
        program.take(copies.load(hpczero.sharding(program.model)).extra)
        copies.keep_found()
        program.step = 3
        found, then = state(program)
        world.check_state(found, weights)
        world.check(then == losses, (then, losses))
        # What a load has brought together does not count: the same node may go once more.
        again = copies_of(after, folder)
        again.find()
        world.check(again.step == 3)
        program.close()


@pytest.mark.ranks(3)
def test_two_lost_neighbours_are_told_of(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with on_nodes(world.comm, range(3)) as nodes:
        copied(nodes, folder)
        for path in parts(folder)[1:]:
            world.on_root(shutil.rmtree, path.parent)
        copies = copies_of(nodes, folder)
        copies.find()
        world.check(copies.step == 0)
        world.check_told(caplog, "those of node(s) 0 are here, and nobody has what node(s) 1 wrote")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_damaged_copy_is_refused(
    world: World, folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def damage() -> None:
        for path in parts(folder):
            data = bytearray((path / name).read_bytes())
            data[len(data) // 2] ^= 1
            (path / name).write_bytes(data)

    with on_nodes(world.comm, range(2)) as nodes:
        copied(nodes, folder)
        world.on_root(damage)
        copies = copies_of(nodes, folder)
        copies.find()
        if name == "manifest.json":
            world.check(copies.step == 0)
            world.check_told(caplog, "manifest.json", times=2)
            return
        program = Program(nodes.topology)
        before = hpczero.full_state_dict(program.model)
        load = copies.load
        world.raises(CorruptCheckpoint, "digest", load, hpczero.sharding(program.model))
        world.check_state(hpczero.full_state_dict(program.model), before)
        program.close()


@pytest.mark.ranks(2)
def test_copy_that_a_kill_left_unfinished_does_not_count_and_goes(
    world: World, folder: Path
) -> None:
    def leave() -> None:
        for path in parts(folder):
            left = path.with_name("step-000000004-0123abcd")
            shutil.copytree(path, left)
            (left / "manifest.json").unlink()

    with on_nodes(world.comm, range(2)) as nodes:
        copied(nodes, folder)
        world.on_root(leave)
        copies = copies_of(nodes, folder)
        copies.find()
        world.check(copies.step == 3)
        world.check(steps_of(parts(folder)) == [3, 4, 3, 4])
        world.comm.Barrier()
        copies.keep_found()
        world.comm.Barrier()
        world.check(steps_of(parts(folder)) == [3, 3])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_failed_copy_leaves_the_one_before(
    world: World, folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, data: npt.NDArray[Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with on_nodes(world.comm, range(2)) as nodes:
        program = Program(nodes.topology)
        sharding, copies = hpczero.sharding(program.model), copies_of(nodes, folder)
        for step in (1, 2):
            program.train(1)
            copies.save(sharding, step, {})
        before = parts(folder)
        world.check(steps_of(before) == [2, 2], before)
        with monkeypatch.context() as patch:
            if world.rank == failing:
                patch.setattr(buddy, "write_at", full)
            program.train(1)
            said = r"No space left on device; older checkpoints are as they were"
            world.raises(CheckpointNotWritten, said, copies.save, sharding, 3, {})
        world.check(parts(folder) == before, parts(folder))
        copies.save(sharding, 3, {})
        world.check(steps_of(parts(folder)) == [3, 3])
        copies.keep()
        world.comm.Barrier()
        world.check(not parts(folder))
        program.close()


def steps_of(found: Sequence[Path]) -> list[int]:
    return [int(path.name.split("-")[1]) for path in found]


@pytest.mark.ranks(2)
def test_folder_that_others_may_enter_is_refused(world: World, folder: Path) -> None:
    with on_nodes(world.comm, range(2)) as nodes:
        copied(nodes, folder)
        world.on_root(lambda: parts(folder)[0].parents[2].chmod(0o755))
        copies = copies_of(nodes, folder)
        copies.find()
        world.check(copies.step == 0)
        program = Program(nodes.topology)
        sharding = hpczero.sharding(program.model)
        expected = r"has mode drwxr-xr-x, of user \d+; expected a directory of user"
        world.raises(CheckpointNotWritten, expected, copies.save, sharding, 3, {})
        program.close()


@pytest.mark.ranks(2)
def test_one_node_is_refused(world: World, folder: Path) -> None:
    with on_nodes(world.comm, [0, 0]) as nodes:
        find = copies_of(nodes, folder, every=5).find
        world.raises(ConfigError, "checkpoint.buddy: got 5 on 1 node.*two nodes or more", find)
        copies_of(nodes, folder, every=0).find()
