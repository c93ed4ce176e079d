"""Training on ranks equals stock torch that sees the ranks' samples as one batch, in one forward and one backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.equality import cases, models
from tests.equality.cases import Case, Place, gpt_case
from tests.equality.reference import (
    LATER_GRADIENTS,
    Record,
    differences,
    train_plain,
    train_sharded,
)
from tests.helpers.parallel import parallel_assert

pytestmark = pytest.mark.mpi


def _momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


CASES = {
    "gpt": gpt_case(models.gpt),
    "awkward mlp": Case(
        lambda: models.seeded(models.AwkwardMLP), batch=lambda place: cases.vectors(place, width=7)
    ),
    "conv net": Case(
        lambda: models.convnet().eval(),  # batch statistics would be those of the global batch
        batch=cases.images,
        loss=cases.own_loss,
        optimizer=_momentum,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_forward_and_backward_of_the_global_batch(topology, name):
    case = CASES[name]
    runs = {stage: train_sharded(case, topology, stage=stage) for stage in (0, 3)}
    problems = []
    if topology.is_root:
        expected = train_plain(replace(case, batch=_joined(case, topology.size)), size=1)
        for stage, found in runs.items():
            wrong = differences(
                [_with_mean_loss(record) for record in found],
                expected,
                later_gradients=LATER_GRADIENTS,
            )
            problems += [f"stage {stage}, {problem}" for problem in wrong]
    parallel_assert(topology.world.comm, not problems, "\n".join(problems[:12]))


def _joined(case: Case, size: int):
    def batch(place: Place) -> cases.Batch:
        parts = [case.batch(replace(place, rank=rank)) for rank in range(size)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    return batch


def _with_mean_loss(record: Record) -> Record:
    return replace(record, losses=(sum(record.losses) / len(record.losses),))
