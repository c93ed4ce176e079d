"""What the plan says of replicas and of a second shard is what the transports count."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.job.mesh import Mesh
from hpczero.models import GPT, GPTConfig
from hpczero.plan.precision import DType, Precision
from hpczero.plan.sent import sent_by
from hpczero.plan.spread import Spread
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]

CONFIG = GPTConfig(vocab_size=61, context=16, layers=3, hidden=32, heads=4)
NODES = [0, 0, 1, 1]


def parameters_and_gradients(sent: Counter[str]) -> int:
    """Bytes but those of a few words on which ranks agree."""
    return sum(nbytes for verb, nbytes in sent.items() if verb != "agree")


@pytest.mark.parametrize(
    ("precision", "reduce"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
)
@pytest.mark.parametrize(
    ("mesh", "stage", "secondary"),
    [
        (Mesh(shard=4), 3, False),
        (Mesh(shard=4), 3, True),
        (Mesh(replicate=2, shard=2), 1, False),
        (Mesh(replicate=2, shard=2), 2, False),
        (Mesh(replicate=2, shard=2), 3, False),
        (Mesh(replicate=4), 1, False),
    ],
)
def test_transports_send_what_the_plan_says(
    comm: MPI.Intracomm, mesh: Mesh, stage: int, secondary: bool, precision: Any, reduce: DType
) -> None:
    topology = hpczero.Topology.create(comm, nodes=NODES, mesh=mesh)
    with torch.device("meta"):
        model = GPT(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"stage": stage, "secondary": secondary}
    hpczero.zeroify(
        model,
        optimizer,
        topology=topology,
        precision=Precision.of(precision, reduce=reduce),
        transport="hierarchical",
        initialize=partial(model.initialize, seed=1),
        **how,
    )
    stats = hpczero.sharding(model).collectives.stats
    calls, before = dict(stats.calls), parameters_and_gradients(stats.sent_nbytes)
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(comm.rank))
    for micro in range(3):
        with hpczero.accumulate(model, micro, 3):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    how |= {"precision": precision, "reduce": reduce, "micro_batch": 2, "accumulation": 3}
    spread = Spread(CONFIG, mesh, 2, **how)
    planned = sent_by(spread, 0)
    sent = parameters_and_gradients(stats.sent_nbytes) - before
    done = {verb: stats.calls[verb] - calls.get(verb, 0) for verb in stats.calls}
    told = f"{sent} {planned.total} {planned} {dict(stats.sent_nbytes)}"
    parallel_assert(comm, sent == planned.total.nbytes, told)
    gathers = done.get("all_gather", 0) + done.get("regather", 0)
    parallel_assert(comm, gathers == planned.all_gathers, f"{done} {planned}")
    if secondary:
        units = len(spread.plan.units)
        parallel_assert(comm, done.get("regather", 0) == 5 * units, f"{done} {units}")
        held = hpczero.sharding(model).memory.peak.get("secondary", 0)
        parallel_assert(comm, held == spread.shares(0).secondary, f"{held} {spread.shares(0)}")
    hpczero.release(model)
    topology.free()
