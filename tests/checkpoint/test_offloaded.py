"""Saved from a memory tier, loaded into memory, and back: the same bits, whoever goes on, and whatever breaks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Offload
from hpczero.checkpoint import Checkpoints, exchange, held
from hpczero.checkpoint.elements import SlabReader
from hpczero.checkpoint.inventory import Inventory
from hpczero.errors import (
    CheckpointMismatch,
    CheckpointNotWritten,
    CorruptCheckpoint,
    StepError,
    TierError,
)
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.programs import OPTIMIZERS, state_digests
from tests.checkpoint.test_reshard import save_and_load
from tests.helpers.small_models import MLP, adamw, mlp_steps
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

WINDOW = 2**14
SIZES = (7, 211, 97, 3)  # shards of several windows


def on_disk(world: World) -> dict[str, Any]:
    folder = world.folder / "scratch"
    folder.mkdir(exist_ok=True)
    return {"stage": 3, "offload": Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)}


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rounds, and hardly a window stays open."""
    monkeypatch.setattr(exchange, "ROUND_NBYTES", 3000)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_checkpoint_does_not_know_where_state_rested(world: World, optimizer: str) -> None:
    away = (world.size, on_disk(world))
    fewer, flat = world.size - 1, (world.size, {**away[1], "transport": "flat"})
    save_and_load(world, away, (fewer, {"stage": 2}), optimizer, place="a")
    save_and_load(world, (fewer, {"stage": 0}), away, optimizer, place="b")
    save_and_load(world, flat, flat, optimizer, place="c")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nor_which_parts_did(world: World, stage: int, precision: str) -> None:
    offload = Offload("host", window=WINDOW, buffers=3)
    away = (world.size, {"stage": stage, "precision": precision, "offload": offload})
    save_and_load(world, away, away)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("parts", [1, 3])
def test_nor_which_units_did(world: World, parts: int, precision: str, cramped: None) -> None:
    """A part of the units in memory: saved and loaded with others there, or with none."""
    where: Any = "host" if parts == 3 else "device"
    kinds: list[dict[str, Any]] = []
    for fraction in (0.3, 0.8):
        offload = Offload("host", where, where, None, WINDOW, 4, fraction=fraction)
        kinds.append({"stage": 3, "precision": precision, "offload": offload})
    plain = {"stage": 2, "precision": precision}
    pairs = [(kinds[0], kinds[1]), (kinds[1], plain), (plain, kinds[0])]
    for place, (one, other) in enumerate(pairs):
        save_and_load(world, (world.size, one), (world.size, other), place=str(place))


def test_state_that_was_cleared_is_not_in_the_file(world: World) -> None:
    """Of one unit; what lay on the tier before is no state of it."""
    found = []
    for place, options in enumerate(({}, on_disk(world))):
        program = Trained(world, 2, **options)
        for piece in hpczero.sharding(program.model).units[1].shards:
            program.optimizer.state[piece].clear()
        path = program.save(world.folder / str(place))
        world.comm.Barrier()
        found.append(state_digests(path))
        program.close()
    world.check(found[0] == found[1])


class Trained:
    """An MLP of many windows after some steps, with Adam."""

    def __init__(self, world: World, steps: int, **options: Any) -> None:
        self.world, self.model = world, MLP(SIZES)
        self.optimizer = adamw(self.model)
        options = {"topology": world.topology, "stage": 3, **options}
        hpczero.zeroify(self.model, self.optimizer, **options)
        self.step = 0
        self.train(steps)

    def train(self, steps: int) -> None:
        mlp_steps(self.model, self.optimizer, self.world.rank, steps)
        self.step += steps

    def save(self, folder: Path) -> Path:
        with Checkpoints(folder, self.model, slab_nbytes=5000) as checkpoints:
            return checkpoints.save(self.step)

    def load(self, folder: Path) -> None:
        self.step = hpczero.checkpoint.load(folder, self.model).step

    def bits(self) -> str:
        """Of all that this rank has. Not collective."""
        found = hashlib.sha256()
        inventory = Inventory.create(hpczero.sharding(self.model))
        numel = inventory.held.numel
        found.update(inventory.values()[slice(0, numel)].numpy().tobytes())
        for key in ("exp_avg", "exp_avg_sq"):
            found.update(inventory.elements(key)[slice(0, numel)].numpy().tobytes())
        found.update(repr(inventory.scalars({"step": "tensor:float32"})).encode())
        return found.hexdigest()

    def weights(self) -> str:
        """Of the whole model as it computes. Collective."""
        found = hpczero.full_state_dict(self.model)
        return "" if found is None else repr([v.tolist() for v in found.values()])

    def close(self) -> None:
        hpczero.release(self.model)


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("parameters", ["disk", "device"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rounds_and_windows_do_not_matter(world: World, precision: str, parameters: Any) -> None:
    """From memory to the tier, from there to another tier, and back to memory; two more steps at the end."""
    away = Offload("disk", "disk", parameters, world.folder, WINDOW, buffers=4)
    options: list[Offload | None] = [None, away, away, None]
    program = Trained(world, 3, precision=precision)
    expected, path = program.bits(), program.save(world.folder / "0")
    digests = state_digests(path)
    program.train(2)
    later = program.weights()
    program.close()
    for place, offload in enumerate(options[1:]):
        program = Trained(world, 1, precision=precision, offload=offload)
        world.check(program.bits() != expected)
        program.load(world.folder / str(place))
        world.check(program.bits() == expected, f"load {place}")
        path = program.save(world.folder / str(place + 1))
        world.comm.Barrier()
        world.check(state_digests(path) == digests, f"save {place}")
        program.train(2)
        world.check(program.weights() == later, f"steps {place}")
        program.close()


def test_a_damaged_checkpoint_leaves_the_model_as_it_was(world: World) -> None:
    program = Trained(world, 2, **on_disk(world))
    path = program.save(world.folder / "a")
    program.train(1)
    before = program.bits()
    for dataset in datasets(path):
        world.on_root(flip_in, path, dataset, dataset.numel - 1)
        world.raises(CorruptCheckpoint, dataset.name, program.load, path)
        world.check(program.bits() == before, dataset.name)
        world.on_root(flip_in, path, dataset, dataset.numel - 1)
    program.train(1)  # nobody doubts it
    program.close()


def test_values_beyond_the_precision_are_refused_before_anything_is_changed(world: World) -> None:
    program = Trained(world, 1)
    with hpczero.gathered(program.model, modifier_rank=0), torch.no_grad():
        next(iter(program.model.parameters()))[-1, 2] = 3.4e38  # rounds to infinity in bf16
    path = program.save(world.folder / "a")
    program.close()
    program = Trained(world, 2, precision="bf16", **on_disk(world))
    before = program.bits()
    pattern = r"layers.0.0.weight\[.* holds 3.4e\+38, which torch.bfloat16 cannot"
    world.raises(CheckpointMismatch, pattern, program.load, path)
    world.check(program.bits() == before)
    program.close()


@contextmanager
def failing(world: World, model: nn.Module, name: str, after: int, error: str) -> Iterator[None]:
    """On the last rank ``name`` of the tier raises a TierError from its call ``after`` on, inside."""
    store = hpczero.sharding(model).away.store
    assert store is not None
    right, calls = getattr(store.tier, name), itertools.count()

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise TierError(error)
        return right(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(store.tier, name, broken)
        yield


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("after", [0, 9])
def test_a_tier_that_cannot_be_read_fails_saves_and_weights_on_all_ranks_and_nothing_else(
    world: World, after: int
) -> None:
    program = Trained(world, 2, **on_disk(world))
    before, weights = program.bits(), program.weights()
    with failing(world, program.model, "_read", after, "got 3 bytes: EIO"):
        world.raises(CheckpointNotWritten, "EIO; older", program.save, world.folder / "a")
    with failing(world, program.model, "_read", 2, "EIO"):
        world.raises(TierError, "EIO", program.weights)
    world.check(program.weights() == weights)
    world.check(not list((world.folder / "a").glob("step-*")))
    world.check(program.bits() == before, "the model")
    program.train(1)
    program.save(world.folder / "a")
    program.train(1)
    program.load(world.folder / "a")  # its blocks have all come back
    program.close()


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("after", [0, 3, 12])
def test_a_tier_that_cannot_be_written_fails_the_load_on_all_ranks_and_nobody_goes_on(
    world: World, after: int
) -> None:
    program = Trained(world, 2, **on_disk(world))
    path = program.save(world.folder / "a")
    saved = program.bits()
    program.train(1)
    later = program.weights()
    with failing(world, program.model, "_write", after, "ENOSPC"):
        world.raises(TierError, "ENOSPC", program.load, path)
    world.raises(StepError, "load a checkpoint", program.weights)
    with pytest.raises(StepError, match="load a checkpoint"):
        program.train(1)
    program.load(path)
    world.check(program.bits() == saved)
    program.train(1)
    world.check(program.weights() == later)
    program.close()


def test_what_breaks_between_the_two_readings_is_not_trained_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is found sound and then cannot be read: an older one is gone on from, or nobody goes on."""
    program = Trained(world, 1, **on_disk(world))
    program.save(world.folder / "a")
    first = program.bits()
    program.train(1)
    newest = program.save(world.folder / "a")
    program.train(1)

    right = SlabReader.fill
    seen: set[tuple[str, int]] = set()

    def fill(self: SlabReader, descriptor: int, dataset: Any, window: range, into: Any) -> None:
        """Slabs of the newest can be read once; then values can still be read, and state cannot."""
        key = dataset.name, window.start
        if self.path == newest and dataset.name.endswith("exp_avg_sq") and key in seen:
            raise CorruptCheckpoint(f"{dataset.name} has gone bad")
        seen.add(key)
        right(self, descriptor, dataset, window, into)

    monkeypatch.setattr(SlabReader, "fill", fill)
    world.raises(CorruptCheckpoint, "has gone bad", program.load, newest)
    world.raises(StepError, "load a checkpoint", program.weights)
    seen.clear()
    program.load(world.folder / "a")
    world.check(program.step == 1)
    world.check(program.bits() == first)
    program.train(1)
    program.close()
