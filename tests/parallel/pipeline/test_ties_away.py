"""Tied weights of a pipeline that rest elsewhere, in part or in whole: the same bits, and compared all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hpczero
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert, told
from tests.parallel.pipeline.models import Make, Staged, batch, check_bits, gpt

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]
BATCHES = [[batch(step, 2)] for step in range(3)]


def with_fraction_away(staged: Make, fraction: float) -> Staged:
    offload = hpczero.Offload("host", fraction=fraction) if fraction else None
    return staged(gpt(), micro_batches=2, stage=1, offload=offload)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_fraction_that_is_away_changes_no_bit(
    comm: MPI.Intracomm, staged: Make, fraction: float
) -> None:
    found, expected = (with_fraction_away(staged, each).train(BATCHES) for each in (fraction, 0.0))
    check_bits(comm, found.weights, expected.weights)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_ties_that_train_apart_are_refused(
    comm: MPI.Intracomm, staged: Make, fraction: float
) -> None:
    stages = with_fraction_away(staged, fraction)
    if comm.rank == 1:
        stages.optimizer.param_groups[0]["weight_decay"] = 0.5
    text = told(StepError, stages.train, BATCHES)
    parallel_assert(comm, "'wte.weight' has other values on the first stage" in text, text)
    stages.optimizer.zero_grad()
