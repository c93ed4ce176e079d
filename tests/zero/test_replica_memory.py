"""Bytes that a rank of several replicas holds, by the ledger, against Plan.memory."""

from __future__ import annotations

import pytest
import torch

import hpczero
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, tiny_gpt, update

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("nodes", "shard"), [((0, 0, 1, 1), 2), ((0, 0, 0, 0), 2), ((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1)]
)
def test_replicas_hold_what_the_plan_says(comm, nodes, shard, precision, stage):
    """Buffers in which replicas sum a shard, of both transports, are in one ledger."""
    mesh = hpczero.Mesh(shard=shard, replicate=comm.size // shard)
    topology = hpczero.Topology.create(comm, nodes, mesh=mesh)
    model = tiny_gpt(vocab_size=512, context=64, layers=3, hidden=64, heads=4)
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=stage, precision=precision, topology=topology)
    sharding = hpczero.sharding(model)
    batch = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(comm.rank))
    for _ in range(3):
        sharding.memory.reset_peak()
        model(batch, batch).backward()
        update(optimizer)
    held = sum(sharding.memory.peak.values()) + sharding.optimizer_nbytes()
    planned = sharding.plan.memory(footprint=sharding.collectives.footprint)
    exchange = sharding.memory.peak["exchange"]
    parallel_assert(comm, exchange == planned.exchange, f"{exchange} and {planned.exchange}")
    parallel_assert(
        comm, abs(held - planned.total) <= 0.03 * planned.total, f"{held} and {planned.total}"
    )
    hpczero.release(model)
    topology.free()
