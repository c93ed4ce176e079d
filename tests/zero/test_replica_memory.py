"""Bytes that a rank of several replicas holds, by the ledger, against Plan.memory."""

from __future__ import annotations

import pytest
import torch

import hpczero
from tests.helpers.small_models import update
from tests.helpers.world import on_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("nodes", "shard"), [([0, 0, 1, 1], 2), ([0] * 4, 2), ([0, 1, 2, 3], 2), ([0, 1, 2, 3], 1)]
)
def test_replicas_hold_what_the_plan_says(comm, nodes, shard, precision, stage):
    """Buffers in which replicas sum a shard, of both transports, are in one ledger."""
    mesh = hpczero.Mesh(shard=shard, replicate=comm.size // shard)
    sizes = {"vocab_size": 512, "context": 64, "layers": 3, "hidden": 64, "heads": 4}
    options = {"stage": stage, "precision": precision}
    batch = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(comm.rank))
    with (
        on_nodes(comm, nodes, mesh=mesh) as world,
        world.gpt(sizes, **options) as (model, optimizer, sharding),
    ):
        for _ in range(3):
            sharding.memory.reset_peak()
            model(batch, batch).backward()
            update(optimizer)
        held = sum(sharding.memory.peak.values()) + sharding.optimizer_nbytes()
        planned = sharding.plan.memory(footprint=sharding.collectives.footprint)
        exchange = sharding.memory.peak["exchange"]
        world.check(exchange == planned.exchange, f"{exchange} and {planned.exchange}")
        near = abs(held - planned.total) <= 0.03 * planned.total
        world.check(near, f"{held} and {planned.total}")
