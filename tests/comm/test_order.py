"""Ranks that run other modules get a named error before a wrong number, and a training loop pays nothing for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.comm.calls import AGAIN
from hpczero.errors import CommError
from tests.helpers.mpirun import run_ranks
from tests.helpers.small_models import MLP, adamw, raises_on_all, zeroified
from tests.helpers.world import World

TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])


class Branching(MLP):
    """Calls its layers in an order that can differ by rank."""

    def __init__(self, sizes: tuple[int, ...] = (6, 6, 6, 6, 6)) -> None:
        super().__init__(sizes=sizes)
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


@pytest.mark.worth("never another model's values")
@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@TRANSPORTS
@pytest.mark.parametrize("strict", ["0", "1"])
def test_rank_that_runs_another_module_is_named(
    world: World, transport: str, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_STRICT", strict)
    model, odd = Branching(), world.size - 1
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=world.topology, transport=transport):
        if world.rank == odd:
            model.order = (0, 2, 1, 3)
        other = rf"rank {odd}: all_gather of 'layers.2'"
        said = raises_on_all(world.comm, CommError, other, lambda: model(torch.ones(1, 6)))
        expected = f"{odd} of {world.size} rank(s) start all_gather of 'layers.1'"
        world.check(expected in said, said)
        optimizer.zero_grad()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", ["flat", "hierarchical"])
def test_ways_that_are_known_are_told_apart_too(world: World, transport: str) -> None:
    model = Branching()
    with zeroified(model, adamw(model), stage=3, topology=world.topology, transport=transport):
        ways = (0, 1, 2, 3), (0, 3), (0, 2, 1, 3)
        with torch.no_grad():
            for order in ways * 2:
                model.order = order
                model(torch.ones(1, 6))
            model.order = ways[world.rank]
            raises_on_all(world.comm, CommError, "ranks disagree", lambda: model(torch.ones(1, 6)))


# Every rank but the last leaves out a layer that all have run before, and the sizes of layers differ.
DEPARTS = """
from mpi4py import MPI
import torch
import hpczero
from tests.comm.test_order import Branching

topology = hpczero.Topology.create(MPI.COMM_WORLD)
model = Branching((6, 700, 6, 40, 6))
layers = [(f"layers.{{i}}",) for i in range(4)]
hpczero.zeroify(model, None, topology=topology, transport="{transport}", rule=lambda model: layers)
with torch.no_grad():
    for batch in range(3):
        expected = model(torch.ones(2, 6))
    if topology.rank:
        model.order = (0, 1)
    found = model(torch.ones(2, 6))
    found = model(torch.ones(2, 6))
print("through", flush=True)
"""


@pytest.mark.worth("never another model's values")
@pytest.mark.parametrize("transport", ["flat", "hierarchical"])
def test_rank_that_leaves_a_known_way_stops_and_says_where(transport: str) -> None:
    program = DEPARTS.format(transport=transport)
    job = run_ranks(2, ["-c", program], timeout=60, env={"HPCZERO_TIMEOUT": "5"})
    assert job.returncode == 86, job
    assert "the comparison of ranks before" in job.stderr, job
    assert "through" not in job.stdout, job


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
@TRANSPORTS
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", ["plain", "accumulated", "nodes"])
def test_a_training_loop_compares_ranks_in_its_first_steps_only(
    world: World, stage: int, transport: str, shape: str
) -> None:
    micro_batches = 3 if shape == "accumulated" else 1
    nodes = [rank // 2 if shape == "nodes" else 0 for rank in range(world.size)]
    topology = hpczero.Topology.create(world.comm, nodes)
    model = MLP(sizes=(6, 6, 6, 6, 6))
    optimizer = adamw(model)
    counts = []
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport) as state:
        order = state.collectives.calls.order
        assert order is not None
        for step in range(3 + AGAIN):
            for micro in range(micro_batches):
                with hpczero.accumulate(model, micro, micro_batches):
                    y = model(torch.full((2, 6), 1.0 + step))
                    y.square().mean().backward()
            hpczero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(order.comparisons)
        before = order.comparisons
        with torch.no_grad():
            for _ in range(8):
                model(torch.ones(2, 6))
        evaluated = order.comparisons - before
    topology.free()
    # Where a backward ends, another micro-batch or the update may follow.
    per_step = micro_batches if micro_batches > 1 else 0
    world.check(counts[-1] - counts[-2] <= per_step, f"{counts}")
    # At most one for each forward, once its own calls are known.
    world.check(evaluated <= 8 + 6, f"{evaluated}")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_strict_run_gives_the_bits_of_a_plain_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for strict in ("0", "1"):
        monkeypatch.setenv("HPCZERO_STRICT", strict)
        model = MLP()
        optimizer = adamw(model)
        with zeroified(model, optimizer, stage=3, topology=world.topology):
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            states.append(hpczero.full_state_dict(model))
    plain, checked = (state or {} for state in states)  # on rank 0 alone
    equal = all(torch.equal(value, checked[name]) for name, value in plain.items())
    world.check(equal and bool(plain) == (world.rank == 0))
