"""Harm that comes to a checkpoint: always found, never loaded, and an older one is gone on from."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE
from hpczero.errors import EXIT_CORRUPT_CHECKPOINT, CorruptCheckpoint
from tests.checkpoint.damage import (
    DAMAGES,
    datasets,
    fingerprint,
    flip,
    flip_in,
    golden_copy,
    repaired_after,
)
from tests.checkpoint.programs import Program, program_of
from tests.helpers.world import World

FLIPS = 300


# --- found by verify -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [STATE_FILE, MANIFEST_FILE])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = golden_copy(tmp_path)
    draw = random.Random(5)
    nbits = 8 * (path / name).stat().st_size
    for place, bit in (divmod(where, 8) for where in draw.sample(range(nbits), FLIPS)):
        flip(path / name, place, bit)
        report = verify(path)
        assert report.verdict is not Verdict.SOUND, f"bit {bit} of byte {place}"
        assert report.problems
        flip(path / name, place, bit)
    assert verify(path).verdict is Verdict.SOUND


def test_a_flip_that_changes_no_meaning_is_found_too(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    file = path / MANIFEST_FILE
    place = file.read_bytes().index(b"1e-08") + 1
    flip(file, place, 5)
    assert b"1E-08" in file.read_bytes()
    assert verify(path).verdict is Verdict.CORRUPT


def test_a_flip_in_any_dataset_is_named(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    draw = random.Random(6)
    assert len(datasets(path)) == 5
    for dataset in datasets(path):
        for element in {0, dataset.numel - 1, *draw.choices(range(dataset.numel), k=8)}:
            flip_in(path, dataset, element)
            (problem,) = verify(path).problems
            slab = dataset.slab(element // dataset.slab_numel)
            assert f"elements {slab.start:,} to {slab.stop:,} of {dataset.name} " in problem
            flip_in(path, dataset, element)


# --- never loaded ----------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_flip_in_any_dataset_is_refused_and_named_and_the_model_stays(
    world: World, stage: int
) -> None:
    with program_of(world.comm, world.size, stage=stage) as program:
        program.train(2)
        path = program.save(world.folder)
        program.train(1)
        before = fingerprint(program)
        table = read_manifest(path).table
        draw = random.Random(7)
        for dataset in datasets(path):
            element = draw.randrange(dataset.numel)
            slab = dataset.slab(element // dataset.slab_numel)
            world.on_root(flip_in, path, dataset, element)
            pattern = f"elements {slab.start:,} to {slab.stop:,} of {dataset.name} "
            message = world.raises(CorruptCheckpoint, pattern, program.load, world.folder)
            names = table.overlapping(slab.start, slab.stop)[:5] if dataset.dtype == "<f4" else []
            world.check(", ".join(names) in message, message)
            world.check(fingerprint(program) == before, dataset.name)
            world.on_root(flip_in, path, dataset, element)
        world.check(program.load(world.folder).path == path)
        world.check(fingerprint(program) != before)


@contextmanager
def damaged(world: World, path: Path, name: str) -> Iterator[None]:
    """The checkpoint ``path`` has come to harm ``name`` inside, on all ranks."""
    with repaired_after(path) if world.rank == 0 else nullcontext():
        world.on_root(DAMAGES[name], path)
        yield
        world.comm.Barrier()
    world.comm.Barrier()


@pytest.mark.mpi
@pytest.mark.ranks(1, 3)
def test_an_older_one_is_gone_on_from_with_a_warning(
    world: World, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    program.train(1)
    older = program.save(world.folder)
    expected = fingerprint(program)
    program.train(1)
    newer = program.save(world.folder)
    program.train(1)
    for name in DAMAGES:
        caplog.clear()
        with damaged(world, newer, name), caplog.at_level(logging.WARNING):
            loaded = program.load(world.folder)
        world.check((loaded.path, loaded.step) == (older, 1), name)
        world.check(fingerprint(program) == expected, name)
        warned = [record.getMessage() for record in caplog.records if "hpczero" in record.name]
        world.check(len(warned) == (2 if world.rank == 0 else 0), f"{name}: {warned}")
        if world.rank == 0:
            assert str(newer) in warned[0]
            assert f"going on from the older {older}" in warned[1]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_where_none_is_sound_the_job_ends_with_its_exit_code(
    world: World, program: Program
) -> None:
    path = program.save(world.folder)
    before = fingerprint(program)
    for name in DAMAGES:
        with damaged(world, path, name):
            none = "no older one is there"
            message = world.raises(CorruptCheckpoint, none, program.load, world.folder)
        world.check(str(path) in message, message)
    world.check(fingerprint(program) == before)
    world.check(CorruptCheckpoint.exit_code == EXIT_CORRUPT_CHECKPOINT)
    program.step = 1
    newer = program.save(world.folder)
    with damaged(world, path, "half"), damaged(world, newer, "half a manifest"):
        neither = "1 older .* not sound either"
        said = world.raises(CorruptCheckpoint, neither, program.load, world.folder)
    world.check("step-000000001: manifest.json is not whole" in said, said)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_checkpoint_that_was_asked_for_by_name_is_loaded_or_nothing(
    world: World, program: Program
) -> None:
    older = program.save(world.folder)
    program.train(1)
    newer = program.save(world.folder)
    before = fingerprint(program)
    world.on_root(flip_in, newer, datasets(newer)[0], 5)
    said = world.raises(CorruptCheckpoint, "elements", program.load, newer)
    world.check("no older one" not in said, said)  # there is one, but nobody looked
    world.check(fingerprint(program) == before)
    world.check(program.load(older).step == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_damage_of_what_only_hdf5_needs_does_not_stop_a_load(
    world: World, program: Program
) -> None:
    path = program.save(world.folder)
    world.on_root(flip, path / STATE_FILE, 20, 3)
    world.check(verify(path).verdict is Verdict.CORRUPT)
    world.check(program.load(world.folder).path == path)
