"""Parts that make no whole model, and damage to the file of one: refused on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MASTER
from hpczero.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint
from hpczero.plan.placement import KEY, ModelPart
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.layouts import first_ranks, program_of
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import same_state, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]

Change = Callable[[ModelPart], ModelPart]


def placed(name: str, **fields: Any) -> Change:
    """Other ``fields`` in the placement of the parameter ``name``."""

    def change(part: ModelPart) -> ModelPart:
        found = part.placements.items()
        other = {n: replace(p, **fields) if p.name == name else p for n, p in found}
        return replace(part, placements=other)

    return change


def named(change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Change:
    """Other names of the whole model."""
    return lambda part: replace(part, names=change(part.names))


def reversed_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return names[::-1]


AFTER, TABLE, PROJECTION = "blocks.1.after", "first.table", "blocks.1.projection"
EVERY, LAST = "every rank", "the last rank"
OTHER_NAMES = ("rank(s) 1", "where rank 0 has", TABLE)
# The degree of 2, the ranks that differ, what of them, and words of the error.
WRONG: dict[str, tuple[str, str, Change, tuple[str, ...]]] = {
    "two copies": ("tensor", EVERY, placed(AFTER, counted=True), (repr(AFTER), "two tensor ranks")),
    "no copy": ("tensor", EVERY, placed(AFTER, counted=False), (repr(AFTER), "hold 0 elements")),
    "tied twice": ("pipeline", EVERY, placed(TABLE, counted=True), (TABLE, "hold 156 elements")),
    "tied nowhere": ("pipeline", EVERY, placed(TABLE, counted=False), (TABLE, "hold 0 elements")),
    "one part twice": (
        "tensor",
        EVERY,
        placed("first.wide", part=0),
        ("two tensor ranks hold part 0 of 2 and part 0", "'first.wide'"),
    ),
    "another shape": (
        "tensor",
        LAST,
        placed(PROJECTION, shape=(9, 9)),
        ("rank 1", f"{PROJECTION!r} is (5, 5)", "(9, 5)"),
    ),
    "names of tensor ranks": ("tensor", LAST, named(reversed_names), OTHER_NAMES),
    "names of stages": ("pipeline", LAST, named(reversed_names), OTHER_NAMES),
    "a name more": (
        "pipeline",
        EVERY,
        named(lambda names: (*names, "blocks.9.more")),
        ("no stage has blocks.9.more",),
    ),
    "a name less": (
        "tensor",
        EVERY,
        named(lambda names: names[:-1]),
        ("does not name last.scale",),
    ),
}


def refused(comm: MPI.Intracomm, program: Any, folder: Path, said: tuple[str, ...]) -> None:
    """A save and a load both raise one error, on every rank; nothing is written."""
    save = partial(hpczero.checkpoint.save, folder / "never", step=1)
    for call in (save, partial(hpczero.checkpoint.load, folder / "good")):
        text = ""
        try:
            call(model=program.model)
        except CheckpointError as error:
            text = str(error)
        parallel_assert(comm, all(word in text for word in said), text)
    assert not list((folder / "never").glob("step-*"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_parts_that_make_no_whole_model_are_refused(
    comm: MPI.Intracomm, folder: Path, case: str
) -> None:
    degree, ranks, change, said = WRONG[case]
    with program_of(comm, {degree: 2}) as program:
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        good = program.model.__dict__[KEY]
        if ranks == EVERY or comm.rank == 1:
            program.model.__dict__[KEY] = change(good)
        refused(comm, program, folder, said)
        program.model.__dict__[KEY] = good
        hpczero.checkpoint.load(folder / "good", program.model)


@pytest.mark.ranks(2)
def test_other_groups_of_the_optimizer_on_a_stage_are_refused(
    comm: MPI.Intracomm, folder: Path
) -> None:
    with program_of(comm, {"pipeline": 2}) as program:
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        groups = program.optimizer.param_groups
        if comm.rank == 1:
            groups.append({**groups[0], "params": []})
        refused(comm, program, folder, ("3 group(s) of AdamW", "2 group(s) of AdamW"))
    with program_of(comm, {"pipeline": 2}, swapped=comm.rank == 1) as program:
        refused(comm, program, folder, ("'first.table'", "in group 1", "in group 0", "stage 1"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate"])
def test_damage_is_named_and_leaves_every_part_as_it_was(
    comm: MPI.Intracomm, folder: Path, degree: str
) -> None:
    with program_of(comm, {degree: comm.size}, stage=3) as program:
        program.train(1)
        path = hpczero.checkpoint.save(folder, program.model, step=1)
        saved = hpczero.full_state_dict(program.model)
        program.train(1)
        later = hpczero.full_state_dict(program.model)
        parallel_assert(comm, saved is None or not same_state(later, saved))
        offset = read_manifest(path).table.named()["blocks.2.projection"].offset
        (master,) = (each for each in datasets(path) if each.name == MASTER)
        on_root(comm, flip_in, path, master, offset + 4)
        with pytest.raises(CorruptCheckpoint, match=r"/state/master.*elements"):
            hpczero.checkpoint.load(path, program.model)
        parallel_assert(comm, same_state(hpczero.full_state_dict(program.model), later))


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_whole_model_is_refused_by_shape_and_name(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """That the whole shapes are compared, not those of parts."""
    with first_ranks(comm, {}) as topology:
        if topology is not None:
            with zeroified(model := torch.nn.Linear(5, 7), None, topology=topology):
                hpczero.checkpoint.save(folder, model, step=1)
    with (
        program_of(comm, {"tensor": 2}) as program,
        pytest.raises(CheckpointMismatch, match=r"the checkpoint has no first\.table"),
    ):
        hpczero.checkpoint.load(folder, program.model)
