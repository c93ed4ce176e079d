"""Saved at N ranks, loaded at M: the same bits, and training goes on as if nothing had happened."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import hpczero
from tests.checkpoint.programs import (
    GLOBAL_BATCH,
    OPTIMIZERS,
    Net,
    Program,
    first_ranks,
    state_digests,
)
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]


def uninterrupted(comm: MPI.Intracomm, ranks: int, **options: Any) -> list[float]:
    """Losses of six steps on ``ranks`` ranks; on the others nothing."""
    losses: list[float] = []
    with first_ranks(comm, ranks) as topology:
        if topology is not None:
            program = Program(topology, **options)
            losses = program.train(6)
            program.close()
    return losses


def save_and_load(
    comm: MPI.Intracomm,
    folder: Path,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    optimizer: str = "AdamW",
) -> None:
    """Three steps on N ranks, a save, a load on M ranks into a model of other values, three more steps."""
    (n, saving), (m, loading) = before, after
    expected = uninterrupted(comm, n, optimizer=optimizer, **saving)
    reference: list[float] = []
    with first_ranks(comm, n) as topology:
        if topology is not None:
            program = Program(topology, optimizer=optimizer, **saving)
            reference = program.train(3)
            saved = program.save(folder / "first")
            assert saved.name == "step-000000003"
            program.close()
    losses: list[float] = []
    loaded = None
    with first_ranks(comm, m) as topology:
        if topology is not None:
            program = Program(topology, optimizer=optimizer, **loading)
            program.train(1)  # so that there is something to replace
            loaded = program.load(folder / "first")
            program.save(folder / "second")
            losses = program.train(3)
            program.close()
    if comm.rank == 0:
        assert loaded is not None
        assert (loaded.step, loaded.world_size) == (3, n)
        assert loaded.extra["sample"] == 3 * GLOBAL_BATCH
        first, second = (folder / name / "step-000000003" for name in ("first", "second"))
        assert state_digests(first) == state_digests(second)
        tolerance = 0.0 if (n, saving) == (m, loading) else 1e-6
        np.testing.assert_allclose(reference + losses, expected, rtol=tolerance, atol=0)


STAGES = itertools.cycle((3, 0, 2, 1, 3, 1, 0, 2, 2, 3))


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
    with first_ranks(comm, 1) as topology:
        if topology is not None:
            program = Program(topology)
            program.train(2)
            program.save(folder / "origin")
            program.close()
    for stage in range(4):
        with first_ranks(comm, 2) as topology:
            assert topology is not None
            program = Program(topology, stage=stage)
            program.load(folder / "origin")
            program.save(folder / f"stage{stage}")
            program.close()
    origin = state_digests(folder / "origin" / "step-000000002")
    for stage in range(4):
        found = state_digests(folder / f"stage{stage}" / "step-000000002")
        parallel_assert(comm, found == origin, f"stage {stage}")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_kept_in_fp32_and_the_loss_scale_with_them(
    comm: MPI.Intracomm, folder: Path, precision: str
) -> None:
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology, precision=precision)
        program.train(3)
        sharding = hpczero.sharding(program.model)
        if precision == "fp16":
            sharding.scaler.scale /= 8
        scale = sharding.loss_scale
        program.save(folder)
        expected = hpczero.full_state_dict(program.model)
        program.close()
        again = Program(topology, precision=precision)
        again.load(folder)
        found = hpczero.full_state_dict(again.model)
        parallel_assert(comm, hpczero.sharding(again.model).loss_scale == scale)
        again.close()
    if found is not None and expected is not None:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(2, 3)
def test_random_streams_go_on_where_they_were(comm: MPI.Intracomm, folder: Path) -> None:
    import random

    def draw() -> list[float]:
        return [torch.rand(1).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)]  # noqa: NPY002

    torch.manual_seed(100 + comm.rank)
    np.random.seed(comm.rank)  # noqa: NPY002
    random.seed(comm.rank)
    draw()
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        program.save(folder)
        expected = draw()
        draw()
        program.load(folder)
        found = draw()
        program.close()
    parallel_assert(comm, found == expected, f"{found} {expected}")
    parallel_assert(comm, len(set(comm.allgather(tuple(found)))) == comm.size)


@pytest.mark.ranks(3)
def test_ranks_that_were_not_there_get_streams_of_their_own(
    comm: MPI.Intracomm, folder: Path
) -> None:
    torch.manual_seed(1)
    with first_ranks(comm, 1) as topology:
        if topology is not None:
            program = Program(topology)
            program.save(folder)
            program.close()
    drawn = []
    for _ in range(2):
        with first_ranks(comm, 3) as topology:
            assert topology is not None
            program = Program(topology)
            program.load(folder)
            drawn.append(torch.rand(1).item())
            program.close()
    everybody = comm.allgather(drawn)
    parallel_assert(comm, len({first for first, _ in everybody}) == 3, str(everybody))
    parallel_assert(comm, all(first == second for first, second in everybody))


@pytest.mark.ranks(2)
def test_tied_frozen_and_buffers_survive(comm: MPI.Intracomm, folder: Path) -> None:
    with first_ranks(comm, 2) as topology:
        assert topology is not None
        program = Program(topology)
        program.train(2)
        expected = hpczero.full_state_dict(program.model)
        program.save(folder)
        program.close()
        other = Program(topology)
        with hpczero.gathered(other.model, modifier_rank=0), torch.no_grad():
            for parameter in other.model.parameters():
                parameter.zero_()
        other.load(folder)
        found = hpczero.full_state_dict(other.model)
        calls = int(other.model.calls)
        other.close()
    parallel_assert(comm, calls == 2)
    if found is not None and expected is not None:
        assert set(found) == {name for name, _ in Net().state_dict().items()}
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert torch.equal(found["back.weight"], found["embed.weight"])


@pytest.mark.ranks(2)
def test_inference_takes_the_values_without_an_optimizer(comm: MPI.Intracomm, folder: Path) -> None:
    with first_ranks(comm, 2) as topology:
        assert topology is not None
        program = Program(topology)
        program.train(2)
        program.save(folder)
        expected = hpczero.full_state_dict(program.model)
        program.close()
        model = Net()
        hpczero.zeroify(model, None, topology=topology)
        hpczero.checkpoint.load(folder, model)
        found = hpczero.full_state_dict(model)
        hpczero.release(model)
    if found is not None and expected is not None:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["two\nlines", "no \udcff UTF-8", 'a "quote" \\'])
def test_folder_may_have_any_character_in_its_name(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path, name: str
) -> None:
    program = Program(topology)
    program.train(1)
    path = program.save(folder / name)
    parallel_assert(comm, program.load(folder / name).path == path)
    parallel_assert(comm, program.load(path).path == path)
    program.close()
