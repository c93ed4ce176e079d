"""Checkpoints of a model with several optimizers: whole at any number of ranks, and refused by other ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.checkpoint import Checkpoints
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.errors import CheckpointMismatch, ConfigError
from tests.checkpoint.damage import values_of
from tests.checkpoint.programs import (
    GLOBAL_BATCH,
    SLAB_NBYTES,
    Net,
    first_ranks,
    global_batch,
    state_digests,
)
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]


def two_groups(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    groups: list[dict[str, Any]] = [{"params": matrices[::2]}, {"params": matrices[1::2]}]
    groups[1]["weight_decay"] = 0.3
    return AdamW(groups, lr=1e-2), SGD(vectors, lr=1e-2, momentum=0.9)


def of_one_kind(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return Adam(matrices, lr=1e-2), Adam(vectors, lr=1e-3, fused=True)


def without_state(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return SGD(vectors, lr=1e-2), RMSprop(matrices, lr=1e-3, momentum=0.5)


SETS: dict[str, Callable[[nn.Module], tuple[Optimizer, ...]]] = {
    "two groups": two_groups,
    "of one kind": of_one_kind,
    "without state": without_state,
}


class Program:
    """A ``Net`` in training by several optimizers, of which the last steps every second time."""

    def __init__(self, topology: hpczero.Topology, make: str = "two groups", **options: Any):
        self.topology, self.step = topology, 0
        self.model = Net()
        self.optimizers = SETS[make](self.model)
        hpczero.zeroify(self.model, self.optimizers, topology=topology, **options)
        self.schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in self.optimizers]

    def train(self, steps: int) -> list[float]:
        """Global losses of so many steps."""
        losses = []
        for _ in range(steps):
            share = GLOBAL_BATCH // self.topology.size
            mine = global_batch(self.step)[self.topology.rank * share :][:share]
            loss = self.model(mine).mean()
            loss.backward()
            due = slice(None) if self.step % 2 else slice(-1)
            for optimizer, scheduler in zip(
                self.optimizers[due], self.schedulers[due], strict=True
            ):
                optimizer.step()
                scheduler.step()
            self.model.zero_grad()
            self.step += 1
            losses.append(sum(self.topology.gather(loss.item())) / self.topology.size)
        return losses

    def save(self, folder: Path) -> Path:
        extra = {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}
        with Checkpoints(folder, self.model, self.optimizers, slab_nbytes=SLAB_NBYTES) as found:
            return found.save(self.step, extra)

    def load(self, folder: Path) -> None:
        found = hpczero.checkpoint.load(folder, self.model, list(self.optimizers))
        for scheduler, state in zip(self.schedulers, found.extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.step = found.step

    def close(self) -> None:
        hpczero.release(self.model)


def goes_on(
    comm: MPI.Intracomm, folder: Path, n: int, m: int, make: str, stages: tuple[int, int]
) -> None:
    """Three steps on N ranks, a save, a load on M ranks, three more steps: as without a stop."""
    saving, loading = stages
    expected: list[float] = []
    losses: list[float] = []
    with first_ranks(comm, n) as topology:
        if topology is not None:
            program = Program(topology, make, stage=saving)
            expected = program.train(3)
            program.save(folder / "first")
            expected += program.train(3)
            program.close()
    with first_ranks(comm, m) as topology:
        if topology is not None:
            program = Program(topology, make, stage=loading)
            program.train(1)  # so that there is something to replace
            program.load(folder / "first")
            program.save(folder / "second")
            losses = program.train(3)
            program.close()
    if comm.rank == 0:
        first, second = (folder / name / "step-000000003" for name in ("first", "second"))
        assert state_digests(first) == state_digests(second)
        kept = [read_manifest(path).meta["optimizer"] for path in (first, second)]
        assert kept[0] == kept[1]
        tolerance = 0.0 if (n, saving) == (m, loading) else 1e-6
        np.testing.assert_allclose(losses, expected[3:], rtol=tolerance, atol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("make", SETS)
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1), (2, 3), (3, 2), (3, 3), (1, 1)])
def test_any_number_of_ranks_goes_on_from_any_other(
    comm: MPI.Intracomm, folder: Path, n: int, m: int, make: str
) -> None:
    stage = (n + len(make)) % 4
    goes_on(comm, folder, n, m, make, (stage, stage))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", SETS)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_any_stage_goes_on_from_any_other(
    comm: MPI.Intracomm, folder: Path, before: int, after: int, make: str
) -> None:
    goes_on(comm, folder, 2, 2, make, (before, after))


@pytest.mark.ranks(2)
def test_the_manifest_says_which_groups_are_whose(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    program = Program(topology)
    program.train(2)
    path = program.save(folder)
    program.close()
    meta = read_manifest(path).meta["optimizer"]
    assert meta["class"] == "AdamW, SGD"
    assert meta["optimizers"] == [["AdamW", 2], ["SGD", 1]]
    assert [group["weight_decay"] for group in meta["groups"]] == [0.01, 0.3, 0]
    assert "momentum_buffer" in meta["kinds"]
    assert "exp_avg" in meta["kinds"]


@pytest.mark.ranks(2)
def test_one_optimizer_is_written_as_ever(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    hpczero.zeroify(model, [SGD(trained, lr=0.1)], topology=topology)
    path = hpczero.checkpoint.save(folder, model, step=1)
    hpczero.release(model)
    meta = read_manifest(path).meta["optimizer"]
    assert list(meta) == ["class", "groups", "kinds", "present"]
    assert meta["class"] == "SGD"


def fewer(model: nn.Module) -> tuple[Optimizer, ...]:
    return (AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),)


def exchanged(model: nn.Module) -> tuple[Optimizer, ...]:
    return two_groups(model)[::-1]


def other_class(model: nn.Module) -> tuple[Optimizer, ...]:
    return two_groups(model)[0], RMSprop(divided(model)[1], lr=1e-2)


def other_groups(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return AdamW(matrices, lr=1e-2), SGD(vectors, lr=1e-2, momentum=0.9)


def other_parameters(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    groups: list[dict[str, Any]] = [{"params": matrices[::2] + vectors}, {"params": matrices[1:2]}]
    return AdamW(groups, lr=1e-2), SGD(matrices[3::2], lr=1e-2, momentum=0.9)


REFUSED: dict[Callable[[nn.Module], tuple[Optimizer, ...]], str] = {
    fewer: r"the state of 2 optimizer\(s\) \(AdamW, SGD\), and .* with 1 optimizer\(s\) \(AdamW\)",
    exchanged: r"2 optimizer\(s\) \(AdamW, SGD\), .* 2 optimizer\(s\) \(SGD, AdamW\); .* same order",
    other_class: r"2 optimizer\(s\) \(AdamW, SGD\), .* with 2 optimizer\(s\) \(AdamW, RMSprop\)",
    other_groups: r"has 2 groups of parameters, and optimizer 0 \(AdamW\) 1; make the same groups",
    other_parameters: r"is in group \d of the optimizer in the checkpoint and in group \d here",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_other_optimizers_are_refused_by_name(
    comm: MPI.Intracomm,
    topology: hpczero.Topology,
    folder: Path,
    make: Callable[[nn.Module], tuple[Optimizer, ...]],
) -> None:
    program = Program(topology)
    program.train(2)
    program.save(folder)
    program.close()
    model = Net()
    hpczero.zeroify(model, make(model), topology=topology)
    before = values_of(hpczero.sharding(model))
    raises_on_all(
        comm, CheckpointMismatch, REFUSED[make], lambda: hpczero.checkpoint.load(folder, model)
    )
    after = values_of(hpczero.sharding(model))
    parallel_assert(comm, all(map(torch.equal, before, after)))
    hpczero.release(model)


@pytest.mark.ranks(2)
def test_several_do_not_go_on_from_one(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    model = Net()
    hpczero.zeroify(model, fewer(model), topology=topology)
    hpczero.checkpoint.save(folder, model, step=1)
    hpczero.release(model)
    program = Program(topology)
    pattern = (
        r"the state of 1 optimizer\(s\) \(AdamW\), and .* with 2 optimizer\(s\) \(AdamW, SGD\)"
    )
    raises_on_all(comm, CheckpointMismatch, pattern, lambda: program.load(folder))
    program.close()


@pytest.mark.ranks(1)
def test_save_with_other_optimizers_than_at_zeroify(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    program = Program(topology)
    first, second = program.optimizers
    for given in (first, (first,), (second, first)):
        with pytest.raises(ConfigError, match=r"not the 2 that .* \(AdamW, SGD, in this order\)"):
            hpczero.checkpoint.save(folder, program.model, given, step=1)
    hpczero.checkpoint.save(folder, program.model, [first, second], step=1)
    program.close()
