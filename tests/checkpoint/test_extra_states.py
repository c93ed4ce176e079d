"""``get_extra_state`` of modules is part of a checkpoint, as it is of ``state_dict()``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.foreign.exporting import export
from hpczero.errors import CheckpointError, CheckpointMismatch
from tests.checkpoint.damage import resigned
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Scaled(nn.Module):
    """Divides by the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.kept: Any = {"amax": 1.0, "history": torch.zeros(3)}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["history"] = torch.cat([self.kept["history"][1:], x.detach().abs().max()[None]])
        self.kept["amax"] = self.kept["history"].max().item()
        result: Tensor = self.linear(x) / self.kept["amax"]
        return result

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Linear(3, 2))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(mlp_input(seed) * (seed + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_with_the_state_that_modules_had(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path, stage: int
) -> None:
    plain = build()
    expected = steps(plain, adamw(plain), range(5))
    model = build()
    with zeroified(model, optimizer := adamw(model), stage=stage, topology=topology):
        steps(model, optimizer, range(3))
        hpczero.checkpoint.save(folder, model, step=3)
    model = build()
    with zeroified(model, optimizer := adamw(model), stage=stage, topology=topology):
        hpczero.checkpoint.load(folder, model)
        found = steps(model, optimizer, range(3, 5))
    parallel_assert(comm, found == pytest.approx(expected[3:], rel=1e-5), f"{found} {expected}")


def test_state_that_differs_between_ranks_comes_back_to_each(
    comm: MPI.Intracomm,
    topology: hpczero.Topology,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    with zeroified(model, None, topology=topology):
        model[0].kept = comm.rank + 5
        path = hpczero.checkpoint.save(folder, model, step=1)
        model[0].kept = 0
        hpczero.checkpoint.load(folder, model)
        parallel_assert(comm, model[0].kept == comm.rank + 5, repr(model[0].kept))
    parallel_assert(comm, read_manifest(path).meta["extra_states"] == {"0": [5, 6]})
    alone = hpczero.Topology.alone()
    with (
        zeroified(model := build(), None, topology=alone),
        caplog.at_level(logging.WARNING, "hpczero.checkpoint"),
    ):
        hpczero.checkpoint.load(folder, model)
        parallel_assert(comm, model[0].kept == 5, "rank 0 of one takes that of rank 0 of two")
        export(path, tmp_path / "weights")
    alone.free()
    parallel_assert(comm, "extra states of 0 differ between the 2 ranks" in caplog.text)
    parallel_assert(comm, "left out what get_extra_state() of 0 gave" in caplog.text)


def test_state_that_no_file_can_hold_is_refused_by_its_module(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    model = build()
    with zeroified(model, None, topology=topology):
        model[0].kept = {"seen": {1, 2}}
        said = r"module '0' \(Scaled\) cannot be kept: state\['seen'\] is a set"
        raises_on_all(comm, CheckpointError, said, hpczero.checkpoint.save, folder, model, step=1)


def test_state_of_a_module_that_is_not_there_is_refused(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    with zeroified(model := MLP((7, 3)), None, topology=topology):
        path = hpczero.checkpoint.save(folder, model, step=1)
        on_root(
            comm, resigned, path, lambda body: body["meta"].update(extra_states={"layers.1": [4]})
        )
        said = "extra state of the module 'layers.1'"
        raises_on_all(comm, CheckpointMismatch, said, hpczero.checkpoint.load, path, model)


def test_file_without_extra_states_loads_and_says_so(
    comm: MPI.Intracomm,
    topology: hpczero.Topology,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checkpoints of before have none."""
    with zeroified(model := build(), None, topology=topology):
        path = hpczero.checkpoint.save(folder, model, step=1)
        on_root(comm, resigned, path, lambda body: body["meta"].pop("extra_states"))
        with caplog.at_level(logging.WARNING, "hpczero.checkpoint"):
            hpczero.checkpoint.load(path, model)
    said = "holds no extra state of ['0']" in caplog.text
    parallel_assert(comm, said == (comm.rank == 0), caplog.text)
