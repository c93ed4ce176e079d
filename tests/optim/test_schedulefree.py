"""Schedule-free AdamW of the schedulefree package trains in shards as it does in plain torch, evaluation included."""

from __future__ import annotations

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

import hpczero
from hpczero.errors import PlanError
from hpczero.optim import publish_changes
from tests.helpers.small_models import distance
from tests.helpers.world import World
from tests.optim.rules import Training, Zoo, trained

pytestmark = pytest.mark.mpi


class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
    """Each element depends on its own gradient and state, and on numbers in its group."""

    hpczero_elementwise = True


def schedule_free(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (ScheduleFree(trained(model), lr=0.02, warmup_steps=2, weight_decay=0.1, eps=1e-4),)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_and_evaluation_are_those_of_plain_torch(world: World, stage):
    ours, plain = (
        Training(schedule_free, world.topology, stage=stage),
        Training(schedule_free, None),
    )
    for training in (ours, plain):
        training.optimizers[0].train()  # type: ignore[attr-defined]
    for _ in range(2):
        ours.train(2)
        plain.train_as(world.size, 2)
        for mode in ("eval", "train"):
            for training in (ours, plain):
                getattr(training.optimizers[0], mode)()
            publish_changes(ours.model)
            logits, expected = (t.model(torch.arange(6)[None]) for t in (ours, plain))
            world.check(torch.allclose(logits, expected, atol=1e-5), mode)
            with hpczero.gathered(ours.model):
                apart = distance(ours.model, plain.model)
            world.check(apart < 2e-6, f"{mode}: {apart} from plain torch")
    ours.close()


@pytest.mark.ranks(2)
def test_the_package_s_own_class_is_refused_with_what_to_say(world: World):
    model = Zoo()

    def call() -> None:
        hpczero.zeroify(model, AdamWScheduleFree(trained(model)), topology=world.topology)

    world.raises(PlanError, "set the class attribute hpczero_elementwise = True", call)
