"""Saved at N ranks, loaded at M: the same bits, and training goes on as if nothing had happened."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from tests.checkpoint.programs import (
    GLOBAL_BATCH,
    OPTIMIZERS,
    Net,
    Program,
    program_of,
    state_digests,
)
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi]


def save_and_load(
    world: World,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    optimizer: str = "AdamW",
    kind: type[Program] = Program,
    place: str = "",
) -> None:
    """Three steps on N ranks, a save, a load on M ranks into a model of other values, three more steps."""
    folder = world.folder / place
    (n, saving), (m, loading) = before, after
    expected, reference, losses, loaded = [], [], [], None
    with program_of(world.comm, n, kind, optimizer=optimizer, **saving) as program:
        if program is not None:
            expected = program.train(6)  # uninterrupted
    with program_of(world.comm, n, kind, optimizer=optimizer, **saving) as program:
        if program is not None:
            reference = program.train(3)
            saved = program.save(folder / "first")
            assert saved.name == "step-000000003"
    with program_of(world.comm, m, kind, optimizer=optimizer, **loading) as program:
        if program is not None:
            program.train(1)  # so that there is something to replace
            loaded = program.load(folder / "first")
            program.save(folder / "second")
            losses = program.train(3)
    if world.rank == 0:
        assert loaded is not None
        assert (loaded.step, loaded.world_size) == (3, n)
        assert loaded.extra["sample"] == 3 * GLOBAL_BATCH
        first, second = (folder / name / "step-000000003" for name in ("first", "second"))
        assert state_digests(first) == state_digests(second)
        kept = [read_manifest(path).meta["optimizer"] for path in (first, second)]
        assert kept[0] == kept[1]
        tolerance = 0.0 if (n, saving) == (m, loading) else 1e-6
        np.testing.assert_allclose(reference + losses, expected, rtol=tolerance, atol=0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_any_number_of_ranks_goes_on_from_any_other(world: World, n: int, m: int) -> None:
    stages = [(n + m) % 4, (n * m + 3) % 4]
    save_and_load(world, (n, {"stage": stages[0]}), (m, {"stage": stages[1]}))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_any_stage_goes_on_from_any_other(world: World, before: int, after: int) -> None:
    save_and_load(world, (3, {"stage": before}), (3, {"stage": after}))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_whatever_an_optimizer_keeps_comes_back(world: World, optimizer: str) -> None:
    save_and_load(world, (world.size, {"stage": 3}), (world.size - 1, {"stage": 0}), optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["flat", "window"])
def test_other_units_and_nodes_do_not_matter(world: World, transport: str) -> None:
    def one_unit(model: torch.nn.Module) -> list[tuple[str, ...]]:
        return []

    saving = {"stage": 3, "transport": transport}
    loading = {"stage": 3, "rule": one_unit}
    save_and_load(world, (4, saving), (3, loading))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_kept_in_fp32_and_the_loss_scale_with_them(
    world: World, precision: str
) -> None:
    with program_of(world.comm, world.size, precision=precision) as program:
        program.train(3)
        sharding = hpczero.sharding(program.model)
        if precision == "fp16":
            sharding.scaler.scale /= 8
        scale = sharding.loss_scale
        program.save(world.folder)
        expected = hpczero.full_state_dict(program.model)
    with program_of(world.comm, world.size, precision=precision) as again:
        again.load(world.folder)
        found = hpczero.full_state_dict(again.model)
        world.check(hpczero.sharding(again.model).loss_scale == scale)
    world.check_state(found, expected)


@pytest.mark.ranks(2, 3)
def test_random_streams_go_on_where_they_were(world: World, program: Program) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)]  # noqa: NPY002

    torch.manual_seed(100 + world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    random.seed(world.rank)
    draw()
    program.save(world.folder)
    expected = draw()
    draw()
    program.load(world.folder)
    found = draw()
    world.check(found == expected, f"{found} {expected}")
    world.check(len(set(world.comm.allgather(tuple(found)))) == world.size)


@pytest.mark.ranks(3)
def test_ranks_that_were_not_there_get_streams_of_their_own(world: World) -> None:
    torch.manual_seed(1)
    with program_of(world.comm, 1) as program:
        if program is not None:
            program.save(world.folder)
    drawn = []
    for _ in range(2):
        with program_of(world.comm, 3) as program:
            program.load(world.folder)
            drawn.append(torch.rand(1).item())
    everybody = world.comm.allgather(drawn)
    world.check(len({first for first, _ in everybody}) == 3, str(everybody))
    world.check(all(first == second for first, second in everybody))


@pytest.mark.ranks(2)
def test_tied_frozen_and_buffers_survive(world: World, program: Program) -> None:
    program.train(2)
    expected = hpczero.full_state_dict(program.model)
    program.save(world.folder)
    with hpczero.gathered(program.model, modifier_rank=0), torch.no_grad():
        for value in (*program.model.parameters(), *program.model.buffers()):
            value.zero_()
    world.check(int(program.model.calls) == 0)
    program.load(world.folder)
    world.check(int(program.model.calls) == 2)
    world.check_state(hpczero.full_state_dict(program.model), expected)
    assert expected is None or expected.keys() == Net().state_dict().keys()


@pytest.mark.ranks(2)
def test_inference_takes_the_values_without_an_optimizer(world: World, program: Program) -> None:
    program.train(2)
    program.save(world.folder)
    expected = hpczero.full_state_dict(program.model)
    with world.zeroified(model := Net(), None):
        hpczero.checkpoint.load(world.folder, model)
        world.check_state(hpczero.full_state_dict(model), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["two\nlines", "no \udcff UTF-8", 'a "quote" \\'])
def test_folder_may_have_any_character_in_its_name(
    world: World, program: Program, name: str
) -> None:
    path = program.save(world.folder / name)
    world.check(program.load(world.folder / name).path == path)
    world.check(program.load(path).path == path)
