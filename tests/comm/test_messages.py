"""Messages between nodes: as many as the plan says, counted where they are described to MPI, and as many buffers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm import Hierarchical, algorithms
from hpczero.memory.buffers import DTYPES
from hpczero.plan import Plan
from hpczero.plan import footprint as rounds
from hpczero.plan.rules import default_rule
from tests.comm.suite import allocated
from tests.helpers.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4)]


@pytest.fixture(params=["nodes of one rank", "nodes of two ranks"])
def topology(comm: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Topology]:
    alone = request.param == "nodes of one rank"
    if not alone and comm.size % 2:
        pytest.skip("an even number of ranks")
    nodes = [rank if alone else rank // 2 for rank in range(comm.size)]
    topology = hpczero.Topology.create(comm, nodes)
    yield topology
    topology.free()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("most", [4, 100])
def test_a_step_sends_the_messages_of_the_plan_and_holds_its_buffers(
    world: World, monkeypatch: pytest.MonkeyPatch, precision: str, most: int
) -> None:
    from mpi4py import MPI

    described = [0]

    class Counting(MPI.Intracomm):
        def Send_init(self, *args: Any, **options: Any) -> MPI.Prequest:
            described[0] += 1
            return super().Send_init(*args, **options)

    # No requests stand, so that each message is described anew.
    monkeypatch.setattr(algorithms, "Standing", partial(algorithms.Standing, most=0))
    monkeypatch.setattr(rounds, "EXCHANGE_MESSAGES", most)
    monkeypatch.setattr(rounds, "GATHER_MESSAGES", most)
    monkeypatch.setattr(rounds, "LEAST_BYTES", 2**12)
    model = nn.Sequential(nn.Linear(301, 401), nn.Linear(401, 103), nn.Linear(103, 7))
    plan = Plan.build(model, stage=3, num_shards=world.size, precision=precision, rule=default_rule)
    dtype, node_dtype = DTYPES[precision], DTYPES[plan.precision.reduce]
    transport = Hierarchical(world.topology, node_dtype=node_dtype)
    between: Any = transport._rails
    between.comm = Counting(between.comm)
    numels = [unit.layout.padded_numel for unit in plan.units]
    _, gradients = allocated(transport, numels, dtype)
    for unit, gradient in zip(plan.units, gradients, strict=True):
        name = unit.name
        whole = torch.ones(unit.layout.padded_numel, dtype=dtype)
        transport.all_gather(whole, name=name).wait()
        transport.all_gather(whole, name=name).wait()
        gradient.take()
        gradient.tensor.fill_(1.0)
        out = torch.empty(unit.layout.shard_numel)
        transport.reduce_scatter(gradient.tensor, out, scale=1.0, name=name).wait()
        gradient.release()
        world.check(bool((out == world.size).all()), name)
    footprint = transport.footprint
    expected = plan.traffic(footprint=footprint).messages
    sent = sum(between.messages)
    scratch = between._scratch._buffer
    held = scratch.nbytes if scratch is not None else 0
    transport.close()
    world.check(described[0] == sent == expected, f"{described} {sent} {expected}")
    wire = plan.wire_itemsize(footprint)
    alone = world.topology.num_nodes == world.size and wire == plan.precision.param_itemsize
    shards = [unit.layout.shard_numel for unit in plan.units]
    most_held = max(footprint.rail_nbytes(shard, wire, alone=alone) for shard in shards)
    world.check(held == most_held, f"{held} {most_held}")
    world.check(expected <= 3 * len(shards) * max(most, world.topology.num_nodes - 1))
