"""What a load or a save refuses: the same error on all ranks, saying what differs, and nothing changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import h5py
import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint.disk.format import STATE_FILE
from hpczero.checkpoint.foreign.exporting import export
from hpczero.errors import (
    EXIT_MISCONFIGURED,
    CheckpointBusy,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    ConfigError,
)
from tests.checkpoint.damage import fingerprint, later_version, values_of
from tests.checkpoint.programs import Program
from tests.helpers.small_models import MLP, adamw, same, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Small(nn.Module):
    """Two layers, a tie and a buffer; each option makes it another model."""

    def __init__(
        self,
        *,
        width: int = 5,
        first: str = "first",
        tied: bool = False,
        depth: int = 2,
        frozen: bool = False,
        buffers: tuple[str, ...] = ("seen",),
        dtype: torch.dtype = torch.int64,
    ) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(4, width))
        self.second = nn.Linear(4, width)
        if tied:
            self.second.weight = self.get_parameter(f"{first}.weight")
        for extra in range(depth - 2):
            self.add_module(f"more{extra}", nn.Linear(2, 2))
        self.get_submodule(first).requires_grad_(not frozen)
        for name in buffers:
            self.register_buffer(name, torch.zeros(2, dtype=dtype))


@contextmanager
def small(
    world: World, kind: Callable[..., Any] = torch.optim.AdamW, groups: int = 1, **options: Any
) -> Iterator[tuple[nn.Module, Any]]:
    """A ``Small`` with an optimizer of so many groups, sharded inside."""
    model = Small(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind([{"params": trained[i::groups]} for i in range(groups)], lr=0.1)
    with world.zeroified(model, optimizer):
        yield model, optimizer


TIE, THERE = "second.weight is tied to first.weight", "in the checkpoint"
FIRST = "first.weight, first.bias"
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer": ({}, {"depth": 4}, r"has no more0.weight, more0.bias, more1.weight, more1.bias"),
    "more": ({"depth": 3}, {}, r"the model has no more0.weight, more0.bias"),
    "many more": ({"depth": 9}, {}, r"the model has no (more\d\.\w+, ){4}more\d\.\w+ and 9 more"),
    "shapes": ({}, {"width": 6}, rf"first.weight is \(5, 4\) {THERE} and \(6, 4\) in the model; f"),
    "names": ({}, {"first": "uno"}, rf"has no uno.weight, uno.bias; the model has no {FIRST}"),
    "frozen there": ({"frozen": True}, {}, rf"frozen {THERE} and trained here: {FIRST}"),
    "tied here only": ({}, {"tied": True}, rf"{TIE} here and not {THERE}"),
    "tied there only": ({"tied": True}, {}, rf"{TIE} {THERE} and not here"),
    "optimizer": (
        {},
        {"kind": torch.optim.SGD},
        r"holds the state of AdamW, and the optimizer is SGD",
    ),
    "groups": ({}, {"groups": 2}, r"has 1 groups of parameters, and the optimizer 2"),
    "no buffer": ({"buffers": ()}, {}, r"the checkpoint has no buffer seen"),
    "a buffer more": (
        {"buffers": ("a", "seen")},
        {},
        rf"buffer 'a' is int64 \(2,\) {THERE} and not in",
    ),
    "buffers": (
        {},
        {"dtype": torch.int32},
        r"buffer 'seen' is int64 \(2,\) .* and int32 \(2,\) in the model",
    ),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_another_model_is_refused_with_a_list_of_differences(world: World, difference: str) -> None:
    theirs, ours, pattern = OTHERS[difference]
    with small(world, **theirs) as (model, _):
        for step in (1, 2):
            hpczero.checkpoint.save(world.folder, model, step=step)
    with small(world, **ours) as (model, optimizer):
        before = values_of(hpczero.sharding(model))
        load = partial(hpczero.checkpoint.load, world.folder, model, optimizer)
        said = world.raises(CheckpointMismatch, pattern, load)
        world.check("step-000000002" in said, said)  # and did not fall back to step 1
        world.check(same(before, values_of(hpczero.sharding(model))))
        world.check(not optimizer.state)
    world.check(CheckpointMismatch.exit_code == EXIT_MISCONFIGURED)


def test_what_was_trained_may_be_frozen_now(world: World) -> None:
    with small(world) as (model, _):
        hpczero.checkpoint.save(world.folder, model, step=1)
        expected = hpczero.full_state_dict(model)
    with small(world, frozen=True) as (model, _):
        hpczero.checkpoint.load(world.folder, model)
        world.check_state(hpczero.full_state_dict(model), expected)


def test_later_version_asks_for_an_upgrade_and_nothing_older_is_taken(
    world: World, program: Program
) -> None:
    program.save(world.folder)
    program.train(1)
    world.on_root(later_version, program.save(world.folder))
    before = fingerprint(program)
    world.raises(CheckpointMismatch, "upgrade hpczero", program.load, world.folder)
    world.check(fingerprint(program) == before)


def test_an_empty_folder_has_nothing_to_load(world: World, program: Program) -> None:
    for path in (world.folder, world.folder / "missing"):
        world.raises(ConfigError, f"{path}: no checkpoint there", program.load, path)
        with program.checkpoints(path) as checkpoints:
            world.check(checkpoints.load() is None)
    world.check(not (world.folder / "missing").exists())


class Keeps(torch.optim.Optimizer):
    """An elementwise optimizer that keeps something odd of every parameter."""

    hpczero_elementwise = True
    odd: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = type(self).odd(p)


def keeps(model: nn.Module) -> Keeps:
    return Keeps(model.parameters(), {"lr": 0.1})


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "bf16": (lambda p: p.bfloat16(), "bfloat16"),
    "other shape": (lambda p: torch.zeros(p.numel() + 1), "torch.float32"),
    "fp64": (lambda p: p.double(), "float64"),
    "a list": (lambda p: [1, 2], "list"),
}


@pytest.mark.parametrize("odd", ODD)
def test_state_that_cannot_be_kept_is_refused(world: World, odd: str) -> None:
    Keeps.odd, got = staticmethod(ODD[odd][0]), ODD[odd][1]
    with world.mlp(keeps) as (model, optimizer):
        optimizer.step()
        pattern = rf"optimizer state 'odd' is .*{got}.*cannot be kept"
        save = partial(hpczero.checkpoint.save, world.folder, model)
        world.raises(CheckpointError, pattern, save, step=1)
    world.check(list(world.folder.iterdir()) == [])


def test_a_second_job_is_refused_on_all_ranks(world: World, program: Program) -> None:
    with program.checkpoints(world.folder) as checkpoints:
        checkpoints.save(1)
        world.raises(CheckpointBusy, "held by process", program.save, world.folder)
        checkpoints.save(2)
    program.save(world.folder)
    world.comm.Barrier()
    world.check(not list(world.folder.glob(".*")))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("writer", ["mpio", "posix"])
def test_a_rank_that_cannot_open_the_file_ends_the_save_on_all(
    world: World, program: Program, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """It must not leave the others waiting in MPI-IO."""
    if writer == "mpio" and not h5py.get_config().mpi:
        pytest.skip("h5py was built without MPI")
    real = os.open

    def fails(path: str | os.PathLike[str], *rest: Any, **named: Any) -> int:
        if world.rank == 1 and os.fspath(path).endswith(STATE_FILE):
            raise OSError(errno.ESTALE, "Stale file handle", os.fspath(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", fails)
    said = r"on rank\(s\) 1, could not open the file: .*Stale file handle"
    world.raises(CheckpointNotWritten, said, program.save, world.folder, writer=writer)
    monkeypatch.undo()
    program.save(world.folder, writer=writer)
    world.check(len(list(world.folder.glob("step-*"))) == 1)
    world.check(not list(world.folder.glob(".tmp-*")))


def test_a_job_whose_folder_was_taken_over_commits_nothing(world: World, program: Program) -> None:
    with program.checkpoints(world.folder) as checkpoints:
        checkpoints.save(1)
        if world.rank == 0:
            (lock,) = world.folder.glob(".lock-*")
            lock.unlink()  # as a job on another host does with that of a dead one
        world.raises(CheckpointBusy, "was taken away", checkpoints.save, 2)
        world.check([p.name for p in world.folder.glob("step-*")] == ["step-000000001"])


@pytest.mark.parametrize("change", ["head", "optimizer"])
def test_weights_for_another_head_or_optimizer_come_by_the_way_that_is_named(
    world: World, change: str
) -> None:
    with world.mlp(adamw) as (model, _):
        path = hpczero.checkpoint.save(world.folder, model, step=1)
        saved = hpczero.full_state_dict(model)
    world.on_root(export, path, world.folder / "weights.safetensors")
    model = MLP((7, 15, 15, 4) if change == "head" else (7, 15, 15, 3), seed=4)
    with world.zeroified(model, sgd(model)):
        pattern = r"python -m hpczero.checkpoint export \S+ weights.safetensors, then "
        world.raises(CheckpointMismatch, pattern, hpczero.checkpoint.load, path, model)
        if change == "optimizer":
            hpczero.checkpoint.import_weights(world.folder / "weights.safetensors", model)
            world.check_state(hpczero.full_state_dict(model), saved)


@pytest.mark.parametrize("stage", [0, 3])
def test_state_that_a_program_makes_of_pieces_comes_back(world: World, stage: int) -> None:
    Keeps.odd = staticmethod(lambda p: torch.zeros_like(p.detach()) + 2 * p)
    found = []
    for saved in (True, False):
        with world.mlp(keeps, stage=stage) as (model, optimizer):
            if saved:
                optimizer.step()
                path = hpczero.checkpoint.save(world.folder, model, step=1)
            else:
                hpczero.checkpoint.load(path, model)
            pieces = [p for group in optimizer.param_groups for p in group["params"]]
            found.append([optimizer.state[p]["odd"].tolist() for p in pieces])
    world.check(found[0] == found[1] and (world.rank > 0 or bool(found[0])), found)
