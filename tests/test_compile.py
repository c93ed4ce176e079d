"""Blocks that torch.compile has compiled, one by one: the same training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.models import GPT, GPTConfig
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

SIZES = GPTConfig(vocab_size=101, context=16, layers=3, hidden=24, heads=2)


def losses(topology: Topology, stage: int, *, compiled: bool) -> list[float]:
    model = GPT(SIZES)
    model.initialize_all(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology)
    if compiled:
        for block in model.blocks:
            # Without the backend's own arithmetic, so that not a bit may differ.
            block.forward = torch.compile(block.forward, backend="aot_eager")
    generator = torch.Generator().manual_seed(topology.rank)
    found = []
    for _ in range(3):
        tokens = torch.randint(101, (2, 17), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    hpczero.release(model)
    torch._dynamo.reset()  # what it keeps would stay for the tests that follow
    return found


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo looks
def test_compiled_blocks_train_the_same(comm: MPI.Intracomm, topology: Topology) -> None:
    eager, compiled = (losses(topology, 3, compiled=choice) for choice in (False, True))
    parallel_assert(comm, eager == compiled, f"{eager} {compiled}")
