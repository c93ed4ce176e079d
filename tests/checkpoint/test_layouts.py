"""Saved by any layout of tensor ranks, stages, shards and replicas, loaded by any other: the bits of one process."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.checkpoint import Checkpoints, exchange, held
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, cut, gpt_rule, gpt_stages, split
from hpczero.plan.offload import Offload
from tests.checkpoint.layouts import (
    Program,
    contents,
    described,
    first_ranks,
    part_of,
    program_of,
    trained_by_torch,
)
from tests.checkpoint.programs import two_groups
from tests.helpers.small_models import same_state
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi]

SLAB_NBYTES = 1000  # many slabs, and none of them on the edge of anything
STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
    "tensor3": {"tensor": 3},
    "tensor2_pipeline2": {"tensor": 2, "pipeline": 2},
    "tensor2_shard2": {"tensor": 2, "shard": 2},
    "pipeline2_shard2": {"pipeline": 2, "shard": 2},
    "pipeline2_replicate2": {"pipeline": 2, "replicate": 2},
    "replicate2_shard2": {"replicate": 2, "shard": 2},
    "tensor2_sequence2": {"tensor": 2, "sequence": 2},
    "tensor4": {"tensor": 4},
    "pipeline4": {"pipeline": 4},
}


def save(program: Program, folder: Path, **options: Any) -> Path:
    with Checkpoints(
        folder, program.model, program.optimizer, slab_nbytes=SLAB_NBYTES, **options
    ) as checkpoints:
        checkpoints.save(program.step, {"step": program.step})
    return folder / f"step-{program.step:09d}"


def differences(program: Program, expected: dict[str, dict[str, Tensor]]) -> list[str]:
    """Parameters of this rank whose part is not that of ``expected``, padding zero. Collective."""
    found = []
    model, state = program.model, hpczero.sharding(program.model)
    with hpczero.gathered(model):
        for name, parameter in model.named_parameters():
            if not torch.equal(parameter.detach(), part_of(program, name, expected, "values")):
                found.append(name)
    for unit in state.units:
        if not unit.spec.trainable:
            continue
        layout, index = unit.spec.layout, state.topology.shard_index
        moments = {key: torch.full((layout.shard_numel,), 7.0) for key in MOMENTS}
        if unit.away is not None:
            for key in MOMENTS:
                unit.away.read(key, moments[key])
        for position, shard in unit.owned_shards():
            slot = layout.slots[position]
            own = layout.overlap(index, slot.name)
            for key in MOMENTS:
                part = part_of(program, slot.name, expected, key).view(-1)[own.start : own.stop]
                begin = slot.offset + own.start - layout.shard_range(index).start
                held = moments[key][begin : begin + len(own)]
                if unit.away is None:
                    held = program.optimizer.state[shard][key].view(-1)
                if not torch.equal(held, part):
                    found.append(f"{slot.name} {key}")
            if program.optimizer.state[shard]["step"].item() != STEPS:
                found.append(f"{slot.name} step")
    return found


@pytest.fixture
def origin(world: World) -> Path:
    """A checkpoint that one process has written."""
    with program_of(world.comm, {}) as program:
        if program is not None:
            program.train(STEPS)
            save(program, world.folder / "origin")
    return world.folder / "origin" / f"step-{STEPS:09d}"


STAGE = itertools.cycle((3, 0, 2, 1))
STAGES = {name: next(STAGE) for name in LAYOUTS}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layout_has_trained_is_the_file_of_one_process(
    world: World, origin: Path, layout: str
) -> None:
    with program_of(world.comm, LAYOUTS[layout], stage=STAGES[layout]) as program:
        if program is not None:
            program.train(STEPS)
            save(program, world.folder / layout)
    world.check(contents(world.folder / layout / origin.name) == contents(origin))
    world.check(described(world.folder / layout / origin.name) == described(origin))


@pytest.mark.ranks(2, 4)
def test_stages_that_have_layers_in_turn_write_the_same_file(world: World, origin: Path) -> None:
    with program_of(world.comm, {"pipeline": world.size}, stage=1, in_turn=True) as program:
        program.train(STEPS)
        path = save(program, world.folder / "mine")
        wrong = differences(program, trained_by_torch(STEPS))
        means = {n: b for n, b in program.model.named_buffers() if n.endswith("mean")}
        for buffer in means.values():
            buffer.zero_()
        hpczero.checkpoint.load(path, program.model, program.optimizer)
        for name, buffer in means.items():
            layer = int(name.split(".")[1])
            if not torch.equal(buffer, torch.full((layer + 1,), 0.5 + layer)):
                wrong.append(name)
    world.check(not wrong, str(wrong))
    world.check(contents(path) == contents(origin))
    world.check(described(path) == described(origin))


@pytest.mark.worth("any layout resumes from any other")
@pytest.mark.ranks(4)
def test_every_layout_goes_on_from_every_other(world: World, origin: Path) -> None:
    """From one process to each layout; from the file of each to all of them, and from there to the file of before."""
    expected = trained_by_torch(STEPS)
    wrong: list[str] = []
    for layout, degrees in LAYOUTS.items():
        go_on(world, degrees, STAGES[layout], origin, world.folder / layout, expected, wrong)
        if contents(world.folder / layout / origin.name) != contents(origin):
            wrong.append(f"the file of {layout}")
    for layout, degrees in LAYOUTS.items():
        with program_of(world.comm, degrees, stage=(STAGES[layout] + 1) % 4) as program:
            for other in LAYOUTS if program is not None else ():
                program.train(1)  # so that there is something to replace
                source = world.folder / other / origin.name
                hpczero.checkpoint.load(source, program.model, program.optimizer)
                wrong += [f"{other} to {layout}: {t}" for t in differences(program, expected)]
    world.check(not wrong, str(wrong))


def go_on(
    world: World,
    degrees: dict[str, int],
    stage: int,
    source: Path,
    target: Path,
    expected: dict[str, dict[str, Tensor]],
    wrong: list[str],
    **options: Any,
) -> None:
    """Load ``source``, compare, and save it as ``target``."""
    options = {"stage": stage, "initialize": lambda name, t: t.fill_(5.0), **options}
    with program_of(world.comm, degrees, **options) as program:
        if program is not None:
            program.train(1)  # so that there is something to replace
            program.step = hpczero.checkpoint.load(source, program.model, program.optimizer).step
            wrong += [f"{degrees}: {text}" for text in differences(program, expected)]
            save(program, target)
            program.train(1)
            save(program, target)


WINDOW = 2**14


@pytest.mark.ranks(4)
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize(
    "layout", ["tensor3", "tensor4", "tensor2_pipeline2", "tensor2_shard2", "pipeline2_replicate2"]
)
def test_parts_on_a_tier_are_saved_and_loaded_as_those_in_memory(
    world: World, origin: Path, layout: str, medium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rounds, many windows, and hardly one stays open."""
    monkeypatch.setattr(exchange, "ROUND_NBYTES", 3000)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)
    scratch = world.folder if medium == "disk" else None
    wrong: list[str] = []
    expected = trained_by_torch(STEPS)
    target = world.folder / "target"
    for fraction in (1.0, 0.4):
        away = Offload(medium, medium, medium, scratch, WINDOW, 4, fraction=fraction)
        go_on(world, LAYOUTS[layout], 3, origin, target, expected, wrong, offload=away)
        if contents(target / origin.name) != contents(origin):
            wrong.append(f"the file, with {fraction} away")
    go_on(world, LAYOUTS[layout], 1, origin, world.folder / "memory", expected, wrong)
    later = f"step-{STEPS + 1:09d}"
    if contents(target / later) != contents(world.folder / "memory" / later):
        wrong.append("the file of a step more")
    world.check(not wrong, str(wrong))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["tensor2_pipeline2", "tensor2_shard2", "pipeline2_replicate2"])
def test_a_save_in_the_background_holds_the_values_of_its_step(
    world: World, origin: Path, layout: str
) -> None:
    options: dict[str, Any] = {"slab_nbytes": SLAB_NBYTES, "background": True}
    with program_of(world.comm, LAYOUTS[layout], stage=2) as program:
        program.train(STEPS)
        with Checkpoints(world.folder / "mine", program.model, **options) as saved:
            saved.save(program.step, {"step": program.step})
            program.train(2)
    world.check(contents(world.folder / "mine" / origin.name) == contents(origin))
    world.check(verify(world.folder / "mine" / origin.name).verdict is Verdict.SOUND)


@pytest.mark.ranks(4)
def test_tensor_ranks_that_go_on_as_data_parallel_ranks_draw_different_numbers(
    world: World,
) -> None:
    """Tensor ranks have one random stream together, so that their dropout masks are the same."""
    drawn: dict[str, list[float]] = {}
    for name, degrees in (("tensor2", {"tensor": 2}), ("plain", {})):
        topology = hpczero.Topology.create(world.comm, mesh=hpczero.Mesh.of(world.size, **degrees))
        program = Program(topology, stage=1)
        if name == "tensor2":
            torch.manual_seed(topology.data.rank)
            program.train(STEPS)
            save(program, world.folder)
        hpczero.checkpoint.load(
            world.folder / f"step-{STEPS:09d}", program.model, program.optimizer
        )
        drawn[name] = world.comm.allgather(float(torch.rand(())))
        program.close()
        topology.free()
    together, apart = drawn["tensor2"], drawn["plain"]
    world.check(together[0] == together[1] != together[2] == together[3], str(together))
    world.check(len(set(apart)) == 4, str(apart))
    world.check({apart[0], apart[2]} == set(together), str((apart, together)))


# --- models that hpczero itself cuts


CUTS: list[tuple[dict[str, int], int]] = [
    ({}, 1),
    ({"tensor": 2}, 1),
    ({"tensor": 3}, 1),
    ({"pipeline": 2}, 2),
    ({"tensor": 2, "pipeline": 2}, 1),
    ({"tensor": 2, "replicate": 2}, 1),
    ({"pipeline": 2, "shard": 2}, 1),
]


def config(*, tied: bool) -> GPTConfig:
    """Heads and vocabulary that 2 and 3 ranks do not divide."""
    return GPTConfig(
        vocab_size=37, context=8, layers=4, hidden=20, heads=5, ffn_multiple=3, tie_embeddings=tied
    )


def built(
    topology: hpczero.Topology, interleave: int, tied: bool, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT cut for the degrees of ``topology``, with an optimizer of two groups."""
    sizes = config(tied=tied)
    with torch.device("meta"):
        model: nn.Module = GPT(sizes)
        whole = GPT(sizes)
    if topology.pipeline.size > 1:
        cut(model, topology, gpt_stages(model), interleave=interleave)
    split(model, topology, gpt_rule(sizes))
    groups = two_groups(model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    fill = partial(whole.initialize, seed=seed)
    hpczero.zeroify(model, optimizer, topology=topology, stage=2, initialize=fill)
    return model, optimizer


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_is_saved_and_loaded_as_whole_by_every_layout(world: World, tied: bool) -> None:
    """First values without a step, then what one process has trained."""
    weights, wrong = None, []
    with first_ranks(world.comm, {}) as topology:
        if topology is not None:
            model, optimizer = built(topology, 1, tied, seed=3)
            hpczero.checkpoint.save(world.folder / "first", model, step=0)
            for step in range(2):
                tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(step))
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
            hpczero.checkpoint.save(world.folder / "second", model, step=2)
            weights = hpczero.full_state_dict(model)
            hpczero.release(model)
    first, second = (world.folder / name for name in ("first", "second"))
    first, second = first / "step-000000000", second / "step-000000002"
    for degrees, interleave in CUTS:
        with first_ranks(world.comm, degrees) as topology:
            if topology is None:
                continue
            model, _ = built(topology, interleave, tied, seed=3)
            place = world.folder / "mine" / str(degrees)
            path = hpczero.checkpoint.save(place, model, step=0)
            if contents(path) != contents(first):
                wrong.append(f"{degrees}: the file of first values")
            hpczero.checkpoint.load(second, model)
            path = hpczero.checkpoint.save(place, model, step=2)
            if contents(path) != contents(second) or described(path) != described(second):
                wrong.append(f"{degrees}: the file")
            if not same_state(hpczero.full_state_dict(model), weights):
                wrong.append(f"{degrees}: the weights")
            hpczero.release(model)
            close(model)
    world.check(not wrong, str(wrong))
