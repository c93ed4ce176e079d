"""Ranks that run other modules: named before the call under HPCZERO_STRICT=1, else found before the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.errors import CommError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


class Branching(MLP):
    """Calls its layers, which are of equal size, in an order that can differ by rank."""

    def __init__(self) -> None:
        super().__init__(sizes=(6, 6, 6, 6, 6))
        self.order = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def test_rank_that_runs_another_module_is_named(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_STRICT", "1")
    model, odd = Branching(), comm.size - 1
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology):
        if comm.rank == odd:
            model.order = (0, 2, 1, 3)
        said = raises_on_all(
            comm,
            CommError,
            rf"rank {odd}: all_gather of 'layers.2'",
            lambda: model(torch.ones(1, 6)),
        )
        expected = f"{odd} of {comm.size} rank(s) start all_gather of 'layers.1'"
        parallel_assert(comm, expected in said, said)
        optimizer.zero_grad()


def test_without_strict_the_step_refuses_to_update(comm: MPI.Intracomm, topology: Topology) -> None:
    model = Branching()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology) as sharding:
        before = [unit.gather_values() for unit in sharding.units]
        if comm.rank == comm.size - 1:
            model.order = (0, 2, 1, 3)
        with torch.no_grad():
            model(torch.ones(1, 6))  # sizes are equal: weights are mixed up, and nothing hangs
        model.order = (0, 1, 2, 3)
        model(torch.ones(1, 6)).sum().backward()
        said = "different sequences of collectives.*HPCZERO_STRICT=1"
        raises_on_all(comm, CommError, said, optimizer.step)
        after = [unit.gather_values() for unit in sharding.units]
        equal = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        parallel_assert(comm, equal, "something was updated")
        parallel_assert(comm, not optimizer.state, "the optimizer took a step")


def test_strict_run_gives_the_bits_of_a_plain_one(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for strict in ("0", "1"):
        monkeypatch.setenv("HPCZERO_STRICT", strict)
        model = MLP()
        optimizer = adamw(model)
        with zeroified(model, optimizer, stage=3, topology=topology):
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            states.append(hpczero.full_state_dict(model))
    plain, checked = states
    if plain is not None and checked is not None:
        equal = all(torch.equal(plain[name], checked[name]) for name in plain)
    else:
        equal = comm.rank > 0
    parallel_assert(comm, equal)
