"""Models that a program drops without ``hpczero.release``, and how many of the system's things one model takes."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
from torch import nn

import hpczero
from hpczero.zero.zeroify import sharding
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, mlp_backward, sgd

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return sum(thread.name.startswith("hpczero") for thread in threading.enumerate())


def _trained(
    comm: MPI.Intracomm, topology: Topology | None, stage: int, transport: str
) -> list[weakref.ref[object]]:
    """What of a model must go with it; the model has gone when this returns."""
    model = MLP()
    optimizer = sgd(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology, transport=transport)
    mlp_backward(model, comm.rank)
    optimizer.step()
    optimizer.zero_grad()
    parts = sharding(model)
    return [weakref.ref(each) for each in (model, optimizer, parts, parts.collectives)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
def test_a_model_that_is_dropped_is_collected(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    _trained(comm, topology, stage, transport)
    gc.collect()
    before = _descriptors()
    left = _trained(comm, topology, stage, transport)
    gc.collect()
    parallel_assert(comm, [each() for each in left] == [None] * 4)
    parallel_assert(
        comm, _descriptors() == before, f"{_descriptors()} descriptors, {before} before"
    )


def test_the_thread_of_a_dropped_models_own_topology_ends(comm: MPI.Intracomm) -> None:
    before = _threads()
    _trained(comm, None, 3, "flat")
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "hpczero-watchdog":
            thread.join(timeout=0.2)  # it was told, and needs a moment
    parallel_assert(comm, _threads() <= before, f"{_threads()} threads, {before} before")


@pytest.mark.parametrize("stage", [0, 3])
def test_the_number_of_units_does_not_count_in_descriptors(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    taken = []
    for units in (2, 40):
        model = nn.ModuleList(nn.Linear(2, 2) for _ in range(units))
        before = _descriptors()
        hpczero.zeroify(
            model,
            sgd(model),
            stage=stage,
            topology=topology,
            transport="window",
            rule=lambda module: [(name,) for name, _ in module.named_children()],
        )
        taken.append(_descriptors() - before)
        hpczero.release(model)
    parallel_assert(comm, taken[0] == taken[1], f"{taken} descriptors for 2 and for 40 units")
