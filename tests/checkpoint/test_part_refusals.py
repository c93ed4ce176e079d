"""Parts that make no whole model, and damage to the file of one: refused on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint
from hpczero.plan.placement import KEY, ModelPart, Placement
from tests.checkpoint.layouts import Program, first_ranks
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]


def altered(program: Program, change: Callable[[str, Placement], Placement]) -> ModelPart:
    part: ModelPart = program.model.__dict__[KEY]
    return replace(part, placements={n: change(n, p) for n, p in part.placements.items()})


def with_counted(name: str, counted: bool, local: str, placement: Placement) -> Placement:
    del local
    return replace(placement, counted=counted) if placement.name == name else placement


def refused(comm: MPI.Intracomm, program: Program, folder: Path, *said: str) -> None:
    """A save and a load both raise one error, on every rank; nothing is written."""
    text = ""
    try:
        hpczero.checkpoint.save(folder / "never", program.model, step=1)
    except CheckpointError as error:
        text = str(error)
    parallel_assert(comm, all(word in text for word in said), text)
    assert not list((folder / "never").glob("step-*"))
    with pytest.raises(CheckpointError) as told:
        hpczero.checkpoint.load(folder / "good", program.model)
    parallel_assert(comm, all(word in str(told.value) for word in said), str(told.value))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("degree", ["tensor", "pipeline"])
def test_one_copy_of_equal_ones_is_counted(comm: MPI.Intracomm, folder: Path, degree: str) -> None:
    with first_ranks(comm, {degree: 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        good: ModelPart = program.model.__dict__[KEY]
        name = "blocks.1.after" if degree == "tensor" else "first.table"
        numel = 5 if degree == "tensor" else 78
        for counted, held in ((True, 2 * numel), (False, 0)):
            alter = partial(with_counted, name, counted)
            program.model.__dict__[KEY] = altered(program, alter)
            said = f"ranks hold {held} elements"
            if counted and degree == "tensor":
                said = "two tensor ranks"
            refused(comm, program, folder, repr(name), said)
        program.model.__dict__[KEY] = good
        hpczero.checkpoint.load(folder / "good", program.model)
        program.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["blocks.2.qkv", "first.wide"])
def test_two_ranks_with_the_same_part_are_refused(
    comm: MPI.Intracomm, folder: Path, name: str
) -> None:
    with first_ranks(comm, {"tensor": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        program.model.__dict__[KEY] = altered(
            program, lambda n, p: replace(p, part=0) if n == name else p
        )
        refused(comm, program, folder, "two tensor ranks hold part 0 of 2 and part 0", repr(name))
        program.close()


@pytest.mark.ranks(2)
def test_a_parameter_of_another_shape_than_its_placement_is_refused(
    comm: MPI.Intracomm, folder: Path
) -> None:
    with first_ranks(comm, {"tensor": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        if comm.rank == 1:
            program.model.__dict__[KEY] = altered(
                program, lambda n, p: replace(p, shape=(9, 9)) if n.endswith("1.projection") else p
            )
        refused(comm, program, folder, "rank 1", "'blocks.1.projection' is (5, 5)", "(9, 5)")
        program.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("degree", ["tensor", "pipeline"])
def test_other_whole_models_on_two_ranks_are_refused(
    comm: MPI.Intracomm, folder: Path, degree: str
) -> None:
    with first_ranks(comm, {degree: 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        part: ModelPart = program.model.__dict__[KEY]
        if comm.rank == 1:
            program.model.__dict__[KEY] = replace(part, names=part.names[::-1])
        refused(comm, program, folder, "rank(s) 1", "where rank 0 has", "first.table")
        program.model.__dict__[KEY] = replace(part, names=(*part.names, "blocks.9.more"))
        refused(comm, program, folder, "no stage has blocks.9.more")
        program.model.__dict__[KEY] = replace(part, names=part.names[:-1])
        refused(comm, program, folder, "does not name last.scale")
        program.close()


@pytest.mark.ranks(2)
def test_a_tied_weight_in_two_groups_of_the_optimizer_is_refused(
    comm: MPI.Intracomm, folder: Path
) -> None:
    with first_ranks(comm, {"pipeline": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        program.close()
        program = Program(topology, swapped=comm.rank == 1)
        refused(comm, program, folder, "'first.table'", "in group 1", "in group 0", "stage 1")
        program.close()


@pytest.mark.ranks(2)
def test_another_number_of_groups_on_a_stage_is_refused(comm: MPI.Intracomm, folder: Path) -> None:
    with first_ranks(comm, {"pipeline": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.save(folder / "good", program.model, step=1)
        if comm.rank == 1:
            program.optimizer.param_groups.append(
                {**program.optimizer.param_groups[0], "params": []}
            )
        refused(comm, program, folder, "3 group(s) of AdamW", "2 group(s) of AdamW")
        program.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate"])
def test_damage_is_named_and_leaves_every_part_as_it_was(
    comm: MPI.Intracomm, folder: Path, degree: str
) -> None:
    with first_ranks(comm, {degree: comm.size}) as topology:
        assert topology is not None
        program = Program(topology, stage=3)
        program.train(1)
        path = hpczero.checkpoint.save(folder, program.model, step=1)
        before = hpczero.full_state_dict(program.model)
        program.train(1)
        later = hpczero.full_state_dict(program.model)
        table = read_manifest(path).table.named()["blocks.2.projection"]
        place = next(d for d in read_manifest(path).datasets if d.name == "/state/master")
        comm.Barrier()
        if comm.rank == 0:
            assert before is not None
            assert later is not None
            assert not torch.equal(before["last.scale"], later["last.scale"])
            with (path / "state.h5").open("r+b") as file:
                file.seek(place.offset + 4 * table.offset + 17)
                old = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([old[0] ^ 4]))
        comm.Barrier()
        with pytest.raises(CorruptCheckpoint, match=r"/state/master.*elements"):
            hpczero.checkpoint.load(path, program.model)
        found = hpczero.full_state_dict(program.model)
        same = found is None or all(
            torch.equal(found[n], value) for n, value in (later or {}).items()
        )
        parallel_assert(comm, same)
        program.close()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_whole_model_is_refused_by_shape_and_name(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """That the whole shapes are compared, not those of parts."""
    with first_ranks(comm, {}) as topology:
        if topology is not None:
            model = torch.nn.Linear(5, 7)
            hpczero.zeroify(model, None, topology=topology)
            hpczero.checkpoint.save(folder, model, step=1)
            hpczero.release(model)
    with first_ranks(comm, {"tensor": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        with pytest.raises(CheckpointMismatch, match=r"the checkpoint has no first\.table"):
            hpczero.checkpoint.load(folder, program.model)
        program.close()
