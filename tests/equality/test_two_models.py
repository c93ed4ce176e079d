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
from tests.helpers.small_models import seeded

pytestmark = pytest.mark.mpi

STEPS = 5


class Joint:
    """A model whose output another one takes; each has its own optimizer, one loss trains both."""

    def __init__(self) -> None:
        self.lower = seeded(lambda: nn.Sequential(models.Stack(), nn.Linear(3, 5)))
        self.upper = seeded(models.CheckpointedStack, seed=6)
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


class Rivals:
    """A generator and a discriminator, which have a backward and a step in turn."""

    def __init__(self) -> None:
        self.models = [
            seeded(lambda: nn.Sequential(models.Stack(), nn.Linear(3, 5)), seed=seed)
            for seed in (1, 2)
        ]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]

    def loss(self, turn: int, step: int, rank: int) -> Tensor:
        """What the model whose turn it is learns from."""
        generator, discriminator = self.models
        x, _ = cases.vectors(Place(step, turn, rank))
        made = generator(x)
        if turn == 1:
            return (
                F.softplus(-discriminator(x)).mean()
                + F.softplus(discriminator(made.detach())).mean()
            )
        return F.softplus(-discriminator(made)).mean() + F.mse_loss(made, x)

    def train(self, ranks: range, share: int, rounds: int) -> None:
        for step in range(rounds):
            for turn in (1, 0):
                self.optimizers[turn].zero_grad()
                for rank in ranks:
                    (self.loss(turn, step, rank) / share).backward()
                self.optimizers[turn].step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_two_models_between_nodes_do_not_mix_up_their_messages(comm, stage):
    # each has a thread that moves bytes, and both are at work in the generator's backward
    plain = Rivals()
    plain.train(range(comm.size), comm.size, rounds := 20)
    topology = hpczero.Topology.create(comm, nodes=list(range(comm.size)))
    rivals = Rivals()
    for model, optimizer in zip(rivals.models, rivals.optimizers, strict=True):
        hpczero.zeroify(model, optimizer, stage=stage, topology=topology, transport="hierarchical")
    rivals.train(range(comm.rank, comm.rank + 1), 1, rounds)
    errors = []
    for model, other in zip(rivals.models, plain.models, strict=True):
        state = hpczero.full_state_dict(model)
        if state is not None:
            expected = other.state_dict().items()
            errors += [relative_error(state[name], value) for name, value in expected]
        hpczero.release(model)
    topology.free()
    parallel_assert(comm, max(errors, default=0.0) < 1e-5, f"off by {max(errors, default=0):.1e}")


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
    parallel_assert(topology.world.comm, max(errors) <= TOLERANCE, f"off by {max(errors):.1e}")
