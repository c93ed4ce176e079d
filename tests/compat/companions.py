# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Other models beside the one that trains: teachers, averages, critics."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.compat.construct import WIDTH, Habits, Net, Place, Training, plain_step
from tests.helpers.small_models import seeded

habits = Habits()


def keep_teacher(training: Training) -> None:
    training.kept["teacher"] = copy.deepcopy(training.model).requires_grad_(False)


def distil(training: Training) -> None:
    """Mean teacher: a plain copy made before zeroify follows the model."""
    teacher = training.kept["teacher"]

    def loss(place: Place) -> Tensor:
        x, y = training.construct.batch(place)
        out = training.model(x)
        return F.mse_loss(out, y) + F.mse_loss(out, teacher(x))

    training.mean(loss).backward()


@habits.step("mean-teacher", backward=distil, before=keep_teacher)
def follow(training: Training) -> None:
    """An EMA teacher: a plain copy made before zeroify."""
    plain_step(training)
    teacher = training.kept["teacher"]
    with torch.no_grad(), training.whole(training.model):
        for mine, theirs in zip(teacher.parameters(), training.model.parameters(), strict=True):
            mine.lerp_(theirs, 0.2)
    training.note(sum(parameter.square().sum() for parameter in teacher.parameters()))


def average_before(training: Training) -> None:
    training.kept["average"] = AveragedModel(training.model)


@habits.step(
    "averaged-model", before=average_before, remark="`gathered` around `update_parameters`"
)
def average(training: Training) -> None:
    """`AveragedModel`, made before zeroify."""
    plain_step(training)
    with training.whole(training.model):
        training.kept["average"].update_parameters(training.model)
    training.note(sum(p.square().sum() for p in training.kept["average"].parameters()))


def against_other(training: Training) -> None:
    training.kept["other"] = seeded(Net, 9).requires_grad_(False)


@habits.backward("perceptual", after=against_other)
def through_other(training: Training) -> None:
    """A loss through a plain frozen network."""
    other = training.kept["other"]

    def loss(place: Place) -> Tensor:
        x, y = training.construct.batch(place)
        out = training.model(x)
        seen = other(torch.cat([out, out], dim=1))
        return F.mse_loss(out, y) + F.mse_loss(seen, y)

    training.mean(loss).backward()


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Net()
        self.discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


class SharedEncoder(nn.Module):
    """Two heads over one encoder, as two models."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Linear(WIDTH, 3)
        self.one = nn.Sequential(encoder, nn.Tanh(), nn.Linear(3, 3))
        self.other = nn.Sequential(encoder, nn.Tanh(), nn.Linear(3, 1))


def children(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


@habits.step("gan", build=lambda: seeded(Adversaries), parts=children)
def gan(training: Training) -> None:
    """A GAN: two models, two optimizers, `detach`."""
    generator, discriminator = training.models
    first, second = training.optimizers

    def judge(place: Place) -> Tensor:
        x, real = training.construct.batch(place)
        fake = generator(x).detach()
        return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()

    def fool(place: Place) -> Tensor:
        x, real = training.construct.batch(place)
        fake = generator(x)
        return F.softplus(-discriminator(fake)).mean() + F.mse_loss(fake, real)

    second.zero_grad()
    training.mean(judge).backward()
    second.step()
    first.zero_grad()
    training.mean(fool).backward()
    first.step()


@habits.step("actor-critic", build=lambda: seeded(Adversaries), parts=children)
def actor_critic(training: Training) -> None:
    """One loss over two models."""
    for optimizer in training.optimizers:
        optimizer.zero_grad()

    def loss(place: Place) -> Tensor:
        x, y = training.construct.batch(place)
        out = training.models[0](x)
        return F.mse_loss(out, y) + training.models[1](out).square().mean()

    training.mean(loss).backward()
    for optimizer in training.optimizers:
        optimizer.step()


habits.add(
    "shared-encoder",
    "two models share a module, and each is zeroified",
    build=lambda: seeded(SharedEncoder),
    parts=children,
    step=actor_critic,
    refused="belongs to a model that was zeroified already",
    remark="one module that holds both, one optimizer",
)
