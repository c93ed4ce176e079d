"""A second opinion: stock FSDP2, over gloo on this host, trains the same model on the same samples."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpczero.models import GPT
from tests.equality import models
from tests.equality.cases import Case, Lane, gpt_case
from tests.equality.reference import LATER_GRADIENTS, Record, check_near, train_sharded
from tests.helpers.gloo import gloo, skip_where_fsdp2_sums

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]  # gloo on more ranks than cores takes long


@pytest.fixture
def process_group(comm):
    """torch's own process group over the same ranks."""
    with gloo(comm):
        yield


def train_fsdp2(case: Case, rank: int, allgather) -> list[Record]:
    """As ``train_sharded``, with every block and the root wrapped by ``fully_shard``."""
    model = case.build()
    assert isinstance(model, GPT)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = case.optimizer(model)
    records = []
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = case.program(Lane(case, model, step=step, rank=rank, no_sync=_unused))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        state = {name: _whole(value) for name, value in model.state_dict().items()}
        records.append(Record(tuple(allgather(loss)), (), _whole(norm).item(), gradients, state))
    return records


def _unused():
    raise AssertionError("the program has one backward")


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().clone()


def test_equals_stock_fsdp2(topology, process_group):
    skip_where_fsdp2_sums()
    case = gpt_case(models.gpt, max_norm=4.5)
    theirs = train_fsdp2(case, topology.rank, topology.world.comm.allgather)
    runs = {f"stage {stage}": train_sharded(case, topology, stage=stage) for stage in (0, 3)}
    check_near(topology, runs, theirs, later_gradients=LATER_GRADIENTS)
