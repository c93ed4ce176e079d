"""``.grad`` of the optimizer's shards, and what hooks around the step see of them: as in plain torch, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, grad, mlp_input, sgd, squares, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _norm_of_shards(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


def _norm_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0, foreach=False)


def _scaler(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.ranks(1, 2)  # of three, one owns nothing of units as small as these
@STAGES
@pytest.mark.parametrize("act", [_norm_of_shards, _norm_one_by_one, _scaler])
def test_what_takes_shards_for_whole_gradients_is_refused(world: World, stage, act):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        with pytest.raises(StepError, match="this rank's pieces of the gradients"):
            act(optimizer)
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.1)
        optimizer.step()


def _halve_shards(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = grad(parameter) * 0.5


def _halve_shards_in_place(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        grad(parameter).mul_(0.5)


@STAGES
@pytest.mark.parametrize("halve", [_halve_shards, _halve_shards_in_place])
def test_what_is_assigned_to_gradients_is_clipped_and_added_to(world: World, stage, halve):
    plain = MLP()
    reference = sgd(plain)
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        for scale in (1.0, 2.0):
            world.backward(model, plain, lambda m, rank, s=scale: m(s * mlp_input(rank)).sum())
            _halve_shards(reference)
            halve(optimizer)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        found = hpczero.clip_grad_norm_(model, 0.3)
        world.check(abs(found - expected) < 1e-5 * expected, f"{found} {expected}")
        reference.step()
        optimizer.step()
        world.check_weights(model, plain, within=2e-6)


def _clamp(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.1, 0.1)


def _clamp_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.clamp_(-0.1, 0.1)


CLAMPS = pytest.mark.parametrize("clamp", [_clamp, _clamp_data])


@STAGES
@CLAMPS
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_changed_after_the_step_are_refused(
    world: World, stage, clamp, transport, precision
):
    options = {"stage": stage, "transport": transport, "precision": precision}
    with world.mlp(sgd, **options) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()
        for parameter in optimizer.param_groups[0]["params"]:
            clamp(parameter)
        if optimizer.param_groups[0]["params"]:  # of three ranks, one owns nothing
            with pytest.raises(StepError, match="was changed since the last step"):
                model(mlp_input(world.rank))
        gather = hpczero.gathered(model).__enter__
        world.raises(StepError, "was changed since the last step", gather)


@STAGES
@CLAMPS
def test_values_that_were_changed_before_the_step_are_stepped_from(world: World, stage, clamp):
    plain = MLP()
    reference = sgd(plain)
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        world.backward(model, plain, squares)
        for each in (optimizer, reference):
            for parameter in each.param_groups[0]["params"]:
                clamp(parameter)
            each.step()
        world.check_weights(model, plain, within=2e-6)


@STAGES
def test_values_in_other_memory_are_refused_at_the_step(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data * 0.5
        world.raises(StepError, "was given other memory", optimizer.step)


@STAGES
def test_gradients_of_shards_set_to_none_are_in_no_norm(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = None
        world.check(hpczero.clip_grad_norm_(model, 1.0) == 0.0)


@STAGES
@pytest.mark.parametrize("registered", ["before zeroify", "after zeroify"])
def test_hooks_around_the_step(world: World, stage, registered):
    model = MLP()
    optimizer = sgd(model)
    refused: list[str] = []
    seen: list[list[float]] = []

    def before(chosen: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in chosen.param_groups[0]["params"]:
            if parameter.grad is not None:
                try:
                    parameter.grad.norm()
                except StepError as error:
                    refused.append(str(error))

    def after(chosen: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with hpczero.gathered(model):
            seen.append([float(p.detach().double().sum()) for p in model.parameters()])

    def register() -> None:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    if registered == "before zeroify":
        register()
    with world.zeroified(model, optimizer, stage=stage) as sharding:
        if registered == "after zeroify":
            register()
        for _ in range(2):
            model(mlp_input(world.rank)).sum().backward()
            update(optimizer)
            state = hpczero.full_state_dict(model)
            sums = None if state is None else [float(v.double().sum()) for v in state.values()]
            world.check(seen[-1] == world.comm.bcast(sums), "values of before the step")
        owned = 2 * sum(len(unit.shards) for unit in sharding.units)
        world.check(len(refused) == owned, f"{len(refused)} of {owned} were refused")
