"""Whole values of a model of which ranks hold parts, and first values and foreign weights for such parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import CheckpointMismatch, PlanError
from hpczero.plan.offload import Offload
from hpczero.zero.full_state import StateByUnit
from tests.checkpoint.layouts import (
    FROZEN,
    LAYERS,
    TIED,
    Program,
    first_ranks,
    initialize,
    numbers,
    part_of,
    trained_by_torch,
    whole_shapes,
)
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]

LAYOUTS = [
    {"tensor": 2},
    {"tensor": 3},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "shard": 2},
    {"pipeline": 2, "replicate": 2},
    {"tensor": 4},
]


def fits(comm: MPI.Intracomm, degrees: dict[str, int]) -> bool:
    size = 1
    for degree in degrees.values():
        size *= degree
    return size <= comm.size


def whole(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """With further names and buffers, as the whole model's ``state_dict()`` has them."""
    found = values | {alias: values[name] for alias, name in TIED.items()}
    found["first.seen"] = torch.arange(3) + 7
    for layer in range(LAYERS):
        found[f"blocks.{layer}.mean"] = torch.full((layer + 1,), 0.5 + layer)
    return found


def unlike(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> list[str]:
    assert found is not None
    names = sorted(found.keys() ^ expected.keys())
    return names + [n for n in expected if n in found and not torch.equal(found[n], expected[n])]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_whole_state_is_that_of_one_process(
    comm: MPI.Intracomm, degrees: dict[str, int], stage: int
) -> None:
    if not fits(comm, degrees):
        return
    wrong: list[str] = []
    with first_ranks(comm, degrees) as topology:
        if topology is not None:
            program = Program(topology, stage=stage)
            program.train(2)
            found = hpczero.full_state_dict(program.model)
            by_unit = StateByUnit(program.model)
            collected = dict(by_unit.tensors or {})
            numels = []
            for pairs in by_unit.units():
                numels.append(sum(value.numel() for _, value in pairs))
                for stand, value in pairs:
                    collected |= {n: value.clone() for n, t in collected.items() if t is stand}
            if topology.is_root:
                expected = whole({n: v["values"] for n, v in trained_by_torch(2).items()})
                wrong += unlike(found, expected) + unlike(collected, expected)
                if found is not None and found["last.head"] is not found["first.table"]:
                    wrong.append("a tied weight is there twice")
                if len(numels) < LAYERS + 1 or not all(numels):
                    wrong.append("not unit by unit")
            elif found is not None or by_unit.tensors is not None:
                wrong.append("only rank 0 has it")
            program.close()
    parallel_assert(comm, not wrong, str(wrong))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_whole_gradients_are_those_of_one_process_on_every_rank(
    comm: MPI.Intracomm, degrees: dict[str, int]
) -> None:
    if not fits(comm, degrees):
        return
    wrong: list[str] = []
    with first_ranks(comm, degrees) as topology:
        if topology is not None:
            program = Program(topology, stage=2)
            before = hpczero.full_gradients(program.model)
            program.model(0).backward()
            expected = {n: numbers(n, "gradient 0") for n in whole_shapes() if n != FROZEN}
            found = {n: g for n, g in hpczero.full_gradients(program.model).items() if g.numel()}
            expected = {n: g for n, g in expected.items() if g.numel()}
            wrong = list(before) + unlike(found, expected)
            program.close()
    parallel_assert(comm, not wrong, str(wrong))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_first_values_are_parts_of_the_same_whole_parameters_for_every_layout(
    comm: MPI.Intracomm, degrees: dict[str, int]
) -> None:
    if not fits(comm, degrees):
        return
    wrong: list[str] = []
    asked: list[tuple[str, tuple[int, ...]]] = []
    with first_ranks(comm, degrees) as topology:
        if topology is not None:

            def draw(name: str, tensor: Tensor) -> None:
                asked.append((name, tuple(tensor.shape)))
                initialize(name, tensor)

            program = Program(topology, stage=3, initialize=draw)
            values = {name: {"values": numbers(name, "values")} for name in whole_shapes()}
            with hpczero.gathered(program.model):
                for name, parameter in program.model.named_parameters():
                    expected = part_of(program, name, values, "values")
                    if not torch.equal(parameter.detach(), expected):
                        wrong.append(name)
            shapes = whole_shapes()
            wrong += [f"{name} as {shape}" for name, shape in asked if shapes[name][0] != shape]
            program.close()
    parallel_assert(comm, not wrong, str(wrong))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate", "shard"])
def test_other_values_on_one_rank_are_refused_on_all(comm: MPI.Intracomm, degree: str) -> None:
    with first_ranks(comm, {degree: comm.size}) as topology:
        assert topology is not None

        def draw(name: str, tensor: Tensor) -> None:
            initialize(name, tensor)
            if topology.rank == comm.size - 1 and name == "first.table":
                tensor[3, 1] += 1.0

        said = ""
        try:
            Program(topology, initialize=draw)
        except PlanError as error:
            said = str(error)
        wanted = {"tensor": "'first.table'", "pipeline": "tied parameter 'first.table'"}
        parallel_assert(comm, wanted.get(degree, "different values for unit") in said, said)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate", "shard"])
def test_a_rank_that_cannot_draw_stops_all(comm: MPI.Intracomm, degree: str) -> None:
    with first_ranks(comm, {degree: comm.size}) as topology:
        assert topology is not None

        def draw(name: str, tensor: Tensor) -> None:
            if topology.rank == comm.size - 1 and (name.startswith("last") or degree != "pipeline"):
                raise PlanError(f"no numbers for {name}")
            initialize(name, tensor)

        said = ""
        try:
            Program(topology, initialize=draw)
        except PlanError as error:
            said = str(error)
        parallel_assert(comm, f"rank(s) {comm.size - 1}" in said and "no numbers" in said, said)


@pytest.mark.ranks(2)
def test_without_initialize_tensor_ranks_get_the_first_ones_whole_parameters(
    comm: MPI.Intracomm,
) -> None:
    with first_ranks(comm, {"tensor": 2}) as topology:
        assert topology is not None
        program = Program(topology, initialize=None, made_by=topology.rank)
        same = True
        with hpczero.gathered(program.model):
            for name, parameter in program.model.named_parameters():
                cut = program.model.placed[name].dim is not None
                same &= bool((parameter == (topology.rank if cut else 0)).all())
        parallel_assert(comm, same)
        program.close()


@pytest.mark.ranks(4)
def test_without_initialize_parts_of_a_tied_weight_may_differ(comm: MPI.Intracomm) -> None:
    """Between tensor ranks, which hold other rows of it; not between stages."""
    with first_ranks(comm, {"tensor": 2, "pipeline": 2}) as topology:
        assert topology is not None
        program = Program(topology, initialize=None, made_by=topology.tensor.rank)
        name = "first.table" if topology.pipeline.rank == 0 else "last.head"
        with hpczero.gathered(program.model):
            held = dict(program.model.named_parameters())[name].detach().clone()
        parallel_assert(comm, bool((held == topology.tensor.rank).all()))
        program.close()


@pytest.mark.ranks(2)
def test_without_initialize_a_tied_weight_with_two_values_is_refused(comm: MPI.Intracomm) -> None:
    with first_ranks(comm, {"pipeline": 2}) as topology:
        assert topology is not None
        with pytest.raises(PlanError, match=r"tied parameter 'first.table'"):
            Program(topology, initialize=None, made_by=topology.rank)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("away", [False, True])
def test_foreign_weights_reach_every_part(
    comm: MPI.Intracomm, folder: Path, degrees: dict[str, int], away: bool
) -> None:
    if not fits(comm, degrees):
        return
    values = {name: numbers(name, "foreign") for name in whole_shapes()}
    if comm.rank == 0:
        plain = {n: v.clone() for n, v in whole(values).items() if n not in TIED}
        safetensors.torch.save_file(plain, folder / "model.safetensors")
    comm.Barrier()
    wrong: list[str] = []
    with first_ranks(comm, degrees) as topology:
        if topology is not None:
            offload = Offload("host", "host", "host", window=16384, buffers=4) if away else None
            program = Program(topology, stage=3, offload=offload)
            hpczero.checkpoint.import_weights(folder / "model.safetensors", program.model)
            found = hpczero.full_state_dict(program.model)
            if topology.is_root:
                wrong += unlike(found, whole(values))
            program.close()
    parallel_assert(comm, not wrong, str(wrong))


@pytest.mark.ranks(2)
def test_foreign_weights_of_another_whole_model_are_refused(
    comm: MPI.Intracomm, folder: Path
) -> None:
    if comm.rank == 0:
        values = {name: numbers(name, "foreign") for name in whole_shapes()}
        plain = whole(values) | {"first.table": torch.zeros(7, 6)}
        safetensors.torch.save_file(
            {n: v.clone() for n, v in plain.items() if n != "last.head"}, folder / "m.safetensors"
        )
    comm.Barrier()
    with first_ranks(comm, {"tensor": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        with pytest.raises(
            CheckpointMismatch, match=r"first.table is \(7, 6\).*\(13, 6\) in the model"
        ):
            hpczero.checkpoint.import_weights(folder / "m.safetensors", program.model)
        program.close()


@pytest.mark.ranks(2)
def test_a_state_dict_that_says_more_is_a_named_error(comm: MPI.Intracomm) -> None:
    class Counted(nn.Module):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            pass

    with first_ranks(comm, {"pipeline": 2}) as topology:
        assert topology is not None
        program = Program(topology)
        if comm.rank == 1:
            program.model.more = Counted()
        with pytest.raises(PlanError, match=r"more\._extra_state"):
            hpczero.full_state_dict(program.model)
        program.close()
