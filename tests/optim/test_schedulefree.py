"""Schedule-free AdamW of the schedulefree package trains in shards as it does in plain torch, evaluation included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

import hpczero
from hpczero.errors import PlanError
from hpczero.optim import publish_changes
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import distance, raises_on_all
from tests.optim.rules import Training, Zoo, trained

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
    """Each element depends on its own gradient and state, and on numbers in its group."""

    hpczero_elementwise = True


def schedule_free(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (ScheduleFree(trained(model), lr=0.02, warmup_steps=2, weight_decay=0.1, eps=1e-4),)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_and_evaluation_are_those_of_plain_torch(
    comm: MPI.Intracomm, topology: hpczero.Topology, stage: int
) -> None:
    ours, plain = Training(schedule_free, topology, stage=stage), Training(schedule_free, None)
    for training in (ours, plain):
        training.optimizers[0].train()  # type: ignore[attr-defined]
    for _ in range(2):
        ours.train(2)
        plain.train_as(comm.size, 2)
        for mode in ("eval", "train"):
            for training in (ours, plain):
                getattr(training.optimizers[0], mode)()
            publish_changes(ours.model)
            logits, expected = (t.model(torch.arange(6)[None]) for t in (ours, plain))
            parallel_assert(comm, torch.allclose(logits, expected, atol=1e-5), mode)
            with hpczero.gathered(ours.model):
                apart = distance(ours.model, plain.model)
            parallel_assert(comm, apart < 2e-6, f"{mode}: {apart} from plain torch")
    ours.close()


@pytest.mark.ranks(2)
def test_the_package_s_own_class_is_refused_with_what_to_say(
    comm: MPI.Intracomm, topology: hpczero.Topology
) -> None:
    model = Zoo()

    def call() -> None:
        hpczero.zeroify(model, AdamWScheduleFree(trained(model)), topology=topology)

    raises_on_all(comm, PlanError, "set the class attribute hpczero_elementwise = True", call)
