"""Training on ranks equals stock torch that sees the ranks' samples as one batch, in one forward and one backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.equality import cases, models
from tests.equality.cases import Case, Place, gpt_case
from tests.equality.reference import LATER_GRADIENTS, Record, check_near, train_plain, train_sharded

pytestmark = pytest.mark.mpi


CASES = {
    "gpt": gpt_case(models.gpt),
    "awkward mlp": cases.seeded_case(
        models.AwkwardMLP, batch=lambda place: cases.vectors(place, width=7)
    ),
    # batch statistics would be those of the global batch
    "conv net": cases.convnet_case(lambda: models.convnet().eval()),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_forward_and_backward_of_the_global_batch(topology, name):
    case = CASES[name]
    runs = {f"stage {stage}": train_sharded(case, topology, stage=stage) for stage in (0, 3)}
    means = {name: [_with_mean_loss(record) for record in found] for name, found in runs.items()}
    joined = replace(case, batch=_joined(case, topology.size))
    expected = train_plain(joined, size=1) if topology.is_root else []
    check_near(topology, means, expected, later_gradients=LATER_GRADIENTS)


def _joined(case: Case, size: int):
    def batch(place: Place) -> cases.Batch:
        parts = [case.batch(replace(place, rank=rank)) for rank in range(size)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    return batch


def _with_mean_loss(record: Record) -> Record:
    return replace(record, losses=(sum(record.losses) / len(record.losses),))
