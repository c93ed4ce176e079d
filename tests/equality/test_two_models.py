"""Two sharded models in one process, and gradients that leave a model through its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero
from tests.equality import cases, models
from tests.equality.cases import Place
from tests.equality.reference import TOLERANCE, relative_error
from tests.helpers.parallel import parallel_assert

pytestmark = pytest.mark.mpi

STEPS = 5


class Joint:
    """A model whose output another one takes; each has its own optimizer, one loss trains both."""

    def __init__(self) -> None:
        self.lower = models.seeded(lambda: nn.Sequential(models.Stack(), nn.Linear(3, 5)))
        self.upper = models.seeded(models.CheckpointedStack, seed=6)
        self.optimizers = [cases.adamw(self.lower), cases.adamw(self.upper)]

    def loss(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """The loss, and the input, which takes a gradient."""
        x, y = cases.vectors(Place(step, 0, rank))
        x.requires_grad_()
        return F.mse_loss(self.upper(torch.tanh(self.lower(x))), y), x

    def update(self) -> None:
        """Step of both models."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_plain(size: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Each rank's input gradients in the last step, and the final states, from one process."""
    joint = Joint()
    for step in range(STEPS):
        inputs = []
        for rank in range(size):
            loss, x = joint.loss(step, rank)
            (loss / size).backward()
            assert x.grad is not None
            inputs.append(x.grad * size)  # hpczero averages gradients of parameters, not of inputs
        joint.update()
    return inputs, [joint.lower.state_dict(), joint.upper.state_dict()]


@pytest.mark.parametrize("stages", [(3, 3), (2, 3), (3, 0)], ids=str)
def test_one_loss_through_two_sharded_models(topology, stages):
    joint = Joint()
    pair = (joint.lower, joint.upper)
    for model, optimizer, stage in zip(pair, joint.optimizers, stages, strict=True):
        hpczero.zeroify(model, optimizer, stage=stage, topology=topology)
    for step in range(STEPS):
        loss, x = joint.loss(step, topology.rank)
        loss.backward()
        joint.update()
    found = [hpczero.full_state_dict(model) for model in pair]
    inputs, expected = train_plain(topology.size)
    assert x.grad is not None
    errors = [relative_error(x.grad, inputs[topology.rank])]
    if topology.is_root:
        for mine, theirs in zip(found, expected, strict=True):
            assert mine is not None
            errors += [relative_error(mine[name], value) for name, value in theirs.items()]
    for model in pair:
        hpczero.release(model)
    parallel_assert(topology.world, max(errors) <= TOLERANCE, f"off by {max(errors):.1e}")
