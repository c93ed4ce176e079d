"""Tied weights of a pipeline that rest elsewhere, in part or in whole: the same bits, and compared all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.errors import StepError
from hpczero.models.config import GPTConfig
from hpczero.models.gpt import GPT
from hpczero.parallel import cut
from hpczero.parallel.pipeline.stages import gpt_stages
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


def _trained(
    comm: MPI.Intracomm, fraction: float, *, decay_on_last: float = 0.0
) -> dict[str, Tensor]:
    topology = hpczero.Topology.create(comm, mesh=hpczero.Mesh.of(comm.size, pipeline=2))
    model = GPT(GPTConfig(vocab_size=31, context=6, layers=2, hidden=12, heads=2))
    model.initialize_all(seed=3)
    cut(model, topology, gpt_stages(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload = hpczero.Offload("host", fraction=fraction) if fraction else None
    hpczero.zeroify(model, optimizer, stage=1, topology=topology, offload=offload)
    if comm.rank == comm.size - 1 and decay_on_last:
        optimizer.param_groups[0]["weight_decay"] = decay_on_last
    pipeline = hpczero.Pipeline(model, micro_batches=2)
    try:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = [torch.randint(31, (2, 7), generator=generator) for _ in range(2)]
            pipeline.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens])
            optimizer.step()
            optimizer.zero_grad()
        state: Any = comm.bcast(hpczero.full_state_dict(model))
        return state
    finally:
        optimizer.zero_grad()
        hpczero.release(model)
        topology.free()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_fraction_that_is_away_changes_no_bit(comm: MPI.Intracomm, fraction: float) -> None:
    expected, found = _trained(comm, 0.0), _trained(comm, fraction)
    unequal = [name for name in expected if not expected[name].equal(found[name])]
    parallel_assert(comm, not unequal, str(unequal))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_ties_that_train_apart_are_refused(comm: MPI.Intracomm, fraction: float) -> None:
    text = ""
    try:
        _trained(comm, fraction, decay_on_last=0.5)
    except StepError as error:
        text = str(error)
    parallel_assert(comm, "'wte.weight' has other values on the first stage" in text, text)
