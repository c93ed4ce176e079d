"""Arguments stay the caller's, and results are seen wherever a module leaves them, as in plain torch (issue 15)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hpczero
from tests.equality import cases, passing
from tests.equality.cases import seeded_case

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

EVERY = ("window", "flat", "hierarchical")


def check(equals_one_process, build, **changes):
    options: dict[str, Any] = {"loss": cases.own_loss, "transports": EVERY, "steps": 3} | changes
    equals_one_process(seeded_case(build, **options))


BUILDS = pytest.mark.parametrize(
    "build",
    [
        passing.Containers,
        passing.Writers,
        passing.InplaceRelu,
        passing.Structures,
        passing.SharedStructure,
        passing.Objects,
        passing.AttributeLosses,
        passing.Features,
        passing.Globals,
        passing.Views,
    ],
    ids=lambda build: build.__name__,
)


@BUILDS
def test_ways_of_passing_tensors(equals_one_process, build):
    check(equals_one_process, build)


@BUILDS
@pytest.mark.ranks(2)
def test_one_node_that_is_as_strict_as_two(equals_one_process, build, monkeypatch):
    monkeypatch.setenv("HPCZERO_STRICT", "1")
    check(equals_one_process, build, stages=(3,), transports=("window",))


def test_weight_that_another_module_uses_before_its_own(equals_one_process):
    check(equals_one_process, passing.Late, stages=(0, 1, 2))


def test_gradient_penalty(equals_one_process):
    def loss(model, batch):
        x, y = batch
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, y) + 0.3 * (slope.norm(dim=1) - 1).square().mean()

    check(equals_one_process, passing.Penalty, loss=loss)


def test_gradient_with_respect_to_inputs_alone(equals_one_process):
    def loss(model, batch):
        x, y = batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        return F.mse_loss(model(x + 0.01 * slope.sign()), y)

    check(equals_one_process, passing.Penalty, loss=loss)


def weights(lane):
    inside = hasattr(lane.model, "_hpczero_sharding")
    with hpczero.gathered(lane.model) if inside else nullcontext():
        return 0.02 * sum(p.square().sum() for p in lane.model.parameters())


def after_the_loss(lane):
    loss = lane.loss()
    lane.backward(loss)
    penalty = weights(lane)
    lane.backward(penalty)
    return loss.item() + penalty.item()


def before_the_loss(lane):
    penalty, loss = weights(lane), lane.loss()
    lane.backward(loss)
    lane.backward(penalty)
    return loss.item() + penalty.item()


def with_the_loss(lane):
    loss = lane.loss() + weights(lane)
    lane.backward(loss)
    return loss.item()


def for_every_part(lane):
    return with_the_loss(lane) + with_the_loss(lane)


def instead_of_the_loss(lane):
    penalty = weights(lane)
    lane.backward(penalty)
    return penalty.item()


@pytest.mark.parametrize(
    "program",
    [after_the_loss, before_the_loss, with_the_loss, for_every_part, instead_of_the_loss],
    ids=lambda program: program.__name__,
)
def test_penalty_made_of_weights_inside_gathered(equals_one_process, program):
    check(equals_one_process, passing.InplaceRelu, program=program)


def test_gathered_between_forward_and_backward(equals_one_process):
    def program(lane):
        loss = lane.loss()
        if hasattr(lane.model, "_hpczero_sharding"):
            with hpczero.gathered(lane.model):
                pass
        lane.backward(loss)
        return loss.item()

    check(equals_one_process, passing.Globals, program=program)
