"""Models that a program drops without ``hpczero.release``, and how many of the system's things one model takes."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
from torch import nn

import hpczero
from hpczero.zero.zeroify import sharding
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, mlp_steps, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return sum(thread.name.startswith("hpczero") for thread in threading.enumerate())


def _trained(rank: int, topology: Any, stage: int, transport: str) -> list[weakref.ref[object]]:
    """What of a model must go with it; the model has gone when this returns."""
    model = MLP()
    optimizer = sgd(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology, transport=transport)
    mlp_steps(model, optimizer, rank)
    parts = sharding(model)
    return [weakref.ref(each) for each in (model, optimizer, parts, parts.collectives)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
def test_a_model_that_is_dropped_is_collected(world: World, stage, transport):
    _trained(world.rank, world.topology, stage, transport)
    gc.collect()
    before = _descriptors()
    left = _trained(world.rank, world.topology, stage, transport)
    gc.collect()
    world.check([each() for each in left] == [None] * 4)
    world.check(_descriptors() == before, f"{_descriptors()} descriptors, {before} before")


def test_the_thread_of_a_dropped_models_own_topology_ends(comm):
    before = _threads()
    _trained(comm.rank, None, 3, "flat")
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "hpczero-watchdog":
            thread.join(timeout=0.2)  # it was told, and needs a moment
    parallel_assert(comm, _threads() <= before, f"{_threads()} threads, {before} before")


@pytest.mark.parametrize("stage", [0, 3])
def test_the_number_of_units_does_not_count_in_descriptors(world: World, stage):
    def each_child(module: nn.Module) -> list[tuple[str]]:
        return [(name,) for name, _ in module.named_children()]

    taken = []
    for units in (2, 40):
        model = nn.ModuleList(nn.Linear(2, 2) for _ in range(units))
        options = {"stage": stage, "transport": "window", "rule": each_child}
        before = _descriptors()
        with world.zeroified(model, sgd(model), **options):
            taken.append(_descriptors() - before)
    world.check(taken[0] == taken[1], f"{taken} descriptors for 2 and for 40 units")
