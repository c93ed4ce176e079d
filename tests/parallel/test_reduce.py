"""``--parallel.reduce``: partial sums of gradients travel between nodes and replicas in this dtype, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.models import GPT
from hpczero.options.config import ParallelOptions, RunConfig
from hpczero.run.starting.building import build
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import laid_out, sizes, text
from tests.parallel.wholes import off

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

CONFIG = sizes(tie_embeddings=False)
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"shard": "1"}],
    4: [{}, {"shard": "2"}, {"shard": "node"}, {"shard": "1"}, {"secondary": True}],
}
HALF_ULP = 2.0**-8  # of bf16


def plain_mean(size: int) -> dict[str, torch.Tensor]:
    """The mean gradient over all ranks' samples, in one process."""
    model = GPT(CONFIG)
    model.initialize_all(seed=0)
    for rank in range(size):
        tokens = text(0, 0, rank, CONFIG.context)
        (model(tokens[:, :-1], tokens[:, 1:]) / size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(
    comm: MPI.Intracomm, layout: dict[str, Any], reduce: Literal["fp32", "bf16"]
) -> tuple[dict[str, torch.Tensor], int]:
    """Mean gradients of one step of a run with these options on two nodes, and the bytes that this rank sent."""
    parallel = ParallelOptions(stage=3, reduce=reduce, **layout)
    nodes = [2 * rank // comm.size for rank in range(comm.size)]
    with laid_out(comm, parallel, nodes) as topology:
        config = RunConfig(parallel=parallel)
        model, _ = build(config, GPTAdapter(CONFIG), topology, HostAccelerator())
        tokens = text(0, 0, comm.rank, CONFIG.context)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        found = hpczero.full_gradients(model)
        sent = sum(hpczero.sharding(model).collectives.stats.sent_nbytes.values())
        hpczero.release(model)
    return found, sent


def test_partial_sums_are_rounded_once_and_cost_fewer_bytes(comm: MPI.Intracomm) -> None:
    expected = plain_mean(comm.size)
    for layout in LAYOUTS[comm.size]:
        exact, all_bytes = gradients(comm, layout, "fp32")
        rounded, fewer_bytes = gradients(comm, layout, "bf16")
        for name, mean in expected.items():
            parallel_assert(comm, off(exact[name], mean) < 2e-6, f"{layout} {name}")
            error = off(rounded[name], mean)
            # Above half an ulp where partial sums cancel: they are rounded, and larger than their sum.
            parallel_assert(comm, 2e-5 < error < 3 * HALF_ULP, f"{layout} {name}: {error}")
        parallel_assert(comm, fewer_bytes < all_bytes, f"{layout}: {fewer_bytes} {all_bytes}")
