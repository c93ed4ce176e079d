"""Saved at N ranks, loaded at M: the same bits, and training goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import same_state, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]


def save_and_load(
    comm: MPI.Intracomm,
    folder: Path,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    optimizer: str = "AdamW",
    kind: type[Program] = Program,
) -> None:
    """Three steps on N ranks, a save, a load on M ranks into a model of other values, three more steps."""
    (n, saving), (m, loading) = before, after
    expected, reference, losses, loaded = [], [], [], None
    with program_of(comm, n, kind, optimizer=optimizer, **saving) as program:
        if program is not None:
            expected = program.train(6)  # uninterrupted
    with program_of(comm, n, kind, optimizer=optimizer, **saving) as program:
        if program is not None:
            reference = program.train(3)
            saved = program.save(folder / "first")
            assert saved.name == "step-000000003"
    with program_of(comm, m, kind, optimizer=optimizer, **loading) as program:
        if program is not None:
            program.train(1)  # so that there is something to replace
            loaded = program.load(folder / "first")
            program.save(folder / "second")
            losses = program.train(3)
    if comm.rank == 0:
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
def test_any_number_of_ranks_goes_on_from_any_other(
    comm: MPI.Intracomm, folder: Path, n: int, m: int
) -> None:
    stages = [(n + m) % 4, (n * m + 3) % 4]
    save_and_load(comm, folder, (n, {"stage": stages[0]}), (m, {"stage": stages[1]}))


@pytest.mark.ranks(5)
@pytest.mark.parametrize(("n", "m"), [(5, 1), (5, 2), (5, 3), (5, 4), (1, 5), (2, 5), (5, 5)])
def test_five_ranks_too(comm: MPI.Intracomm, folder: Path, n: int, m: int) -> None:
    save_and_load(comm, folder, (n, {"stage": 3}), (m, {"stage": (n + m) % 4}))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_any_stage_goes_on_from_any_other(
    comm: MPI.Intracomm, folder: Path, before: int, after: int
) -> None:
    save_and_load(comm, folder, (3, {"stage": before}), (3, {"stage": after}))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_whatever_an_optimizer_keeps_comes_back(
    comm: MPI.Intracomm, folder: Path, optimizer: str
) -> None:
    save_and_load(comm, folder, (comm.size, {"stage": 3}), (comm.size - 1, {"stage": 0}), optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["flat", "window"])
def test_other_units_and_nodes_do_not_matter(
    comm: MPI.Intracomm, folder: Path, transport: str
) -> None:
    def one_unit(model: torch.nn.Module) -> list[tuple[str, ...]]:
        return []

    saving = {"stage": 3, "transport": transport}
    loading = {"stage": 3, "rule": one_unit}
    save_and_load(comm, folder, (4, saving), (3, loading))


@pytest.mark.ranks(2)
def test_the_file_is_the_same_whoever_saves(comm: MPI.Intracomm, folder: Path) -> None:
    """Of one state: every dataset has the same bytes from 1 and 2 ranks, at every stage."""
    with program_of(comm, 1) as program:
        if program is not None:
            program.train(2)
            program.save(folder / "origin")
    origin = state_digests(folder / "origin" / "step-000000002")
    for stage in range(4):
        with program_of(comm, 2, stage=stage) as program:
            program.load(folder / "origin")
            path = program.save(folder / f"stage{stage}")
        parallel_assert(comm, state_digests(path) == origin, f"stage {stage}")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_kept_in_fp32_and_the_loss_scale_with_them(
    comm: MPI.Intracomm, folder: Path, precision: str
) -> None:
    with program_of(comm, comm.size, precision=precision) as program:
        program.train(3)
        sharding = hpczero.sharding(program.model)
        if precision == "fp16":
            sharding.scaler.scale /= 8
        scale = sharding.loss_scale
        program.save(folder)
        expected = hpczero.full_state_dict(program.model)
    with program_of(comm, comm.size, precision=precision) as again:
        again.load(folder)
        found = hpczero.full_state_dict(again.model)
        parallel_assert(comm, hpczero.sharding(again.model).loss_scale == scale)
    parallel_assert(comm, same_state(found, expected))


@pytest.mark.ranks(2, 3)
def test_random_streams_go_on_where_they_were(
    comm: MPI.Intracomm, program: Program, folder: Path
) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)]  # noqa: NPY002

    torch.manual_seed(100 + comm.rank)
    np.random.seed(comm.rank)  # noqa: NPY002
    random.seed(comm.rank)
    draw()
    program.save(folder)
    expected = draw()
    draw()
    program.load(folder)
    found = draw()
    parallel_assert(comm, found == expected, f"{found} {expected}")
    parallel_assert(comm, len(set(comm.allgather(tuple(found)))) == comm.size)


@pytest.mark.ranks(3)
def test_ranks_that_were_not_there_get_streams_of_their_own(
    comm: MPI.Intracomm, folder: Path
) -> None:
    torch.manual_seed(1)
    with program_of(comm, 1) as program:
        if program is not None:
            program.save(folder)
    drawn = []
    for _ in range(2):
        with program_of(comm, 3) as program:
            program.load(folder)
            drawn.append(torch.rand(1).item())
    everybody = comm.allgather(drawn)
    parallel_assert(comm, len({first for first, _ in everybody}) == 3, str(everybody))
    parallel_assert(comm, all(first == second for first, second in everybody))


@pytest.mark.ranks(2)
def test_tied_frozen_and_buffers_survive(
    comm: MPI.Intracomm, program: Program, folder: Path
) -> None:
    program.train(2)
    expected = hpczero.full_state_dict(program.model)
    program.save(folder)
    with hpczero.gathered(program.model, modifier_rank=0), torch.no_grad():
        for value in (*program.model.parameters(), *program.model.buffers()):
            value.zero_()
    parallel_assert(comm, int(program.model.calls) == 0)
    program.load(folder)
    parallel_assert(comm, int(program.model.calls) == 2)
    parallel_assert(comm, same_state(hpczero.full_state_dict(program.model), expected))
    assert expected is None or expected.keys() == Net().state_dict().keys()


@pytest.mark.ranks(2)
def test_inference_takes_the_values_without_an_optimizer(
    comm: MPI.Intracomm, topology: hpczero.Topology, program: Program, folder: Path
) -> None:
    program.train(2)
    program.save(folder)
    expected = hpczero.full_state_dict(program.model)
    with zeroified(model := Net(), None, topology=topology):
        hpczero.checkpoint.load(folder, model)
        parallel_assert(comm, same_state(hpczero.full_state_dict(model), expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["two\nlines", "no \udcff UTF-8", 'a "quote" \\'])
def test_folder_may_have_any_character_in_its_name(
    comm: MPI.Intracomm, program: Program, folder: Path, name: str
) -> None:
    path = program.save(folder / name)
    parallel_assert(comm, program.load(folder / name).path == path)
    parallel_assert(comm, program.load(path).path == path)
