"""Whole values of a model of which ranks hold parts, and first values and foreign weights for such parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MASTER
from hpczero.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, PlanError
from hpczero.plan.offload import Offload
from hpczero.plan.placement import KEY, ModelPart
from hpczero.zero.full_state import StateByUnit
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.layouts import (
    FROZEN,
    LAYERS,
    TIED,
    Program,
    first_ranks,
    initialize,
    numbers,
    part_of,
    program_of,
    trained_by_torch,
    whole_shapes,
)
from tests.helpers.parallel import told
from tests.helpers.small_models import same_state, zeroified
from tests.helpers.world import World

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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_whole_state_is_that_of_one_process(
    world: World, degrees: dict[str, int], stage: int
) -> None:
    wrong: list[str] = []
    with program_of(world.comm, degrees, stage=stage) as program:
        if program is not None:
            program.train(2)
            found = hpczero.full_state_dict(program.model)
            by_unit = StateByUnit(program.model)
            collected = dict(by_unit.tensors or {})
            numels = []
            for pairs in by_unit.units():
                numels.append(sum(value.numel() for _, value in pairs))
                for stand, value in pairs:
                    collected |= {n: value.clone() for n, t in collected.items() if t is stand}
            if program.topology.is_root:
                expected = whole({n: v["values"] for n, v in trained_by_torch(2).items()})
                wrong += unlike(found, expected) + unlike(collected, expected)
                if found is not None and found["last.head"] is not found["first.table"]:
                    wrong.append("a tied weight is there twice")
                if len(numels) < LAYERS + 1 or not all(numels):
                    wrong.append("not unit by unit")
            elif found is not None or by_unit.tensors is not None:
                wrong.append("only rank 0 has it")
    world.check(not wrong, str(wrong))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_whole_gradients_are_those_of_one_process_on_every_rank(
    world: World, degrees: dict[str, int]
) -> None:
    wrong: list[str] = []
    with program_of(world.comm, degrees, stage=2) as program:
        if program is not None:
            before = hpczero.full_gradients(program.model)
            program.model(0).backward()
            expected = {n: numbers(n, "gradient 0") for n in whole_shapes() if n != FROZEN}
            found = {n: g for n, g in hpczero.full_gradients(program.model).items() if g.numel()}
            expected = {n: g for n, g in expected.items() if g.numel()}
            wrong = list(before) + unlike(found, expected)
    world.check(not wrong, str(wrong))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_first_values_are_parts_of_the_same_whole_parameters_for_every_layout(
    world: World, degrees: dict[str, int]
) -> None:
    shapes, asked, wrong = whole_shapes(), [], []

    def draw(name: str, tensor: Tensor) -> None:
        asked.append((name, tuple(tensor.shape)))
        initialize(name, tensor)

    values = {name: {"values": numbers(name, "values")} for name in shapes}
    with program_of(world.comm, degrees, stage=3, initialize=draw) as program:
        if program is not None:
            with hpczero.gathered(program.model):
                for name, parameter in program.model.named_parameters():
                    expected = part_of(program, name, values, "values")
                    if not torch.equal(parameter.detach(), expected):
                        wrong.append(name)
    wrong += [f"{name} as {shape}" for name, shape in asked if shapes[name][0] != shape]
    world.check(not wrong, str(wrong))


def refused(world: World, degree: str, draw: Callable[[str, Tensor], None]) -> str:
    """What a model says on this rank whose first values cannot be."""
    with first_ranks(world.comm, {degree: world.size}) as topology:
        assert topology is not None
        return told(PlanError, Program, topology, initialize=draw)


DEGREES = pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate", "shard"])


@pytest.mark.ranks(2, 4)
@DEGREES
def test_other_values_on_one_rank_are_refused_on_all(world: World, degree: str) -> None:
    def draw(name: str, tensor: Tensor) -> None:
        initialize(name, tensor)
        if world.rank == world.size - 1 and name == "first.table":
            tensor[3, 1] += 1.0

    said = refused(world, degree, draw)
    wanted = {"tensor": "'first.table'", "pipeline": "tied parameter 'first.table'"}
    world.check(wanted.get(degree, "different values for unit") in said, said)


@pytest.mark.ranks(2, 4)
@DEGREES
def test_a_rank_that_cannot_draw_stops_all(world: World, degree: str) -> None:
    def draw(name: str, tensor: Tensor) -> None:
        if world.rank == world.size - 1 and (name.startswith("last") or degree != "pipeline"):
            raise PlanError(f"no numbers for {name}")
        initialize(name, tensor)

    said = refused(world, degree, draw)
    world.check(f"rank(s) {world.size - 1}" in said and "no numbers" in said, said)


@pytest.mark.ranks(2)
def test_without_initialize_tensor_ranks_get_the_first_ones_whole_parameters(world: World) -> None:
    with program_of(world.comm, {"tensor": 2}, initialize=None, made_by=world.rank) as program:
        same = True
        with hpczero.gathered(program.model):
            for name, parameter in program.model.named_parameters():
                cut = program.model.placed[name].dim is not None
                same &= bool((parameter == (world.rank if cut else 0)).all())
        world.check(same)


@pytest.mark.ranks(4)
def test_without_initialize_parts_of_a_tied_weight_may_differ(world: World) -> None:
    """Between tensor ranks, which hold other rows of it; not between stages."""
    with first_ranks(world.comm, {"tensor": 2, "pipeline": 2}) as topology:
        assert topology is not None
        program = Program(topology, initialize=None, made_by=topology.tensor.rank)
        name = "first.table" if topology.pipeline.rank == 0 else "last.head"
        with hpczero.gathered(program.model):
            held = dict(program.model.named_parameters())[name].detach().clone()
        world.check(bool((held == topology.tensor.rank).all()))
        program.close()


@pytest.mark.ranks(2)
def test_without_initialize_a_tied_weight_with_two_values_is_refused(world: World) -> None:
    with first_ranks(world.comm, {"pipeline": 2}) as topology:
        assert topology is not None
        with pytest.raises(PlanError, match=r"tied parameter 'first.table'"):
            Program(topology, initialize=None, made_by=topology.rank)


def foreign() -> dict[str, Tensor]:
    """Weights of a whole model."""
    return whole({name: numbers(name, "foreign") for name in whole_shapes()})


def write(file: Path, weights: dict[str, Tensor]) -> None:
    plain = {n: v.clone() for n, v in weights.items() if n not in TIED}
    safetensors.torch.save_file(plain, file)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("away", [False, True])
def test_foreign_weights_reach_every_part(
    world: World, degrees: dict[str, int], away: bool
) -> None:
    world.on_root(write, world.folder / "m.safetensors", foreign())
    wrong: list[str] = []
    offload = Offload("host", "host", "host", window=16384, buffers=4) if away else None
    with program_of(world.comm, degrees, stage=3, offload=offload) as program:
        if program is not None:
            hpczero.checkpoint.import_weights(world.folder / "m.safetensors", program.model)
            found = hpczero.full_state_dict(program.model)
            wrong += unlike(found, foreign()) if program.topology.is_root else []
    world.check(not wrong, str(wrong))


@pytest.mark.ranks(2)
def test_foreign_weights_of_another_whole_model_are_refused(world: World) -> None:
    file = world.folder / "m.safetensors"
    world.on_root(write, file, foreign() | {"first.table": torch.zeros(7, 6)})
    said = r"first.table is \(7, 6\).*\(13, 6\) in the model"
    with (
        program_of(world.comm, {"tensor": 2}) as program,
        pytest.raises(CheckpointMismatch, match=said),
    ):
        hpczero.checkpoint.import_weights(file, program.model)


@pytest.mark.ranks(2)
def test_a_state_dict_that_says_more_is_a_named_error(world: World) -> None:
    class Counted(nn.Module):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            pass

    with program_of(world.comm, {"pipeline": 2}) as program:
        if world.rank == 1:
            program.model.more = Counted()
        with pytest.raises(PlanError, match=r"more\._extra_state"):
            hpczero.full_state_dict(program.model)


# --- parts that make no whole model, and damage to the file of one


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


def refused_both_ways(world: World, program: Any, said: tuple[str, ...]) -> None:
    """A save and a load both raise one error, on every rank; nothing is written."""
    save = partial(hpczero.checkpoint.save, world.folder / "never", step=1)
    for call in (save, partial(hpczero.checkpoint.load, world.folder / "good")):
        text = told(CheckpointError, call, model=program.model)
        world.check(all(word in text for word in said), text)
    assert not list((world.folder / "never").glob("step-*"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_parts_that_make_no_whole_model_are_refused(world: World, case: str) -> None:
    degree, ranks, change, said = WRONG[case]
    with program_of(world.comm, {degree: 2}) as program:
        hpczero.checkpoint.save(world.folder / "good", program.model, step=1)
        good = program.model.__dict__[KEY]
        if ranks == EVERY or world.rank == 1:
            program.model.__dict__[KEY] = change(good)
        refused_both_ways(world, program, said)
        program.model.__dict__[KEY] = good
        hpczero.checkpoint.load(world.folder / "good", program.model)


@pytest.mark.ranks(2)
def test_other_groups_of_the_optimizer_on_a_stage_are_refused(world: World) -> None:
    with program_of(world.comm, {"pipeline": 2}) as program:
        hpczero.checkpoint.save(world.folder / "good", program.model, step=1)
        groups = program.optimizer.param_groups
        if world.rank == 1:
            groups.append({**groups[0], "params": []})
        refused_both_ways(world, program, ("3 group(s) of AdamW", "2 group(s) of AdamW"))
    with program_of(world.comm, {"pipeline": 2}, swapped=world.rank == 1) as program:
        refused_both_ways(world, program, ("first.table", "in group 1", "in group 0", "stage 1"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "replicate"])
def test_damage_is_named_and_leaves_every_part_as_it_was(world: World, degree: str) -> None:
    with program_of(world.comm, {degree: world.size}, stage=3) as program:
        program.train(1)
        path = hpczero.checkpoint.save(world.folder, program.model, step=1)
        saved = hpczero.full_state_dict(program.model)
        program.train(1)
        later = hpczero.full_state_dict(program.model)
        world.check(saved is None or not same_state(later, saved))
        offset = read_manifest(path).table.named()["blocks.2.projection"].offset
        (master,) = (each for each in datasets(path) if each.name == MASTER)
        world.on_root(flip_in, path, master, offset + 4)
        with pytest.raises(CorruptCheckpoint, match=r"/state/master.*elements"):
            hpczero.checkpoint.load(path, program.model)
        world.check_state(hpczero.full_state_dict(program.model), later)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_whole_model_is_refused_by_shape_and_name(world: World) -> None:
    """That the whole shapes are compared, not those of parts."""
    with first_ranks(world.comm, {}) as topology:
        if topology is not None:
            with zeroified(model := torch.nn.Linear(5, 7), None, topology=topology):
                hpczero.checkpoint.save(world.folder, model, step=1)
    with (
        program_of(world.comm, {"tensor": 2}) as program,
        pytest.raises(CheckpointMismatch, match=r"the checkpoint has no first\.table"),
    ):
        hpczero.checkpoint.load(world.folder, program.model)
