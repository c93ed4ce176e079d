"""``parameter.grad`` after backward: what plain torch does with it works on shards, or is refused."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, Loss, grad, mlp_input, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "flat"])


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


Act = Callable[[nn.Module], object]


def clip(model: nn.Module) -> None:
    norm = clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5, "nothing to clip"


def clip_in_two_calls(model: nn.Module) -> None:
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([grad(p) for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)


def scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        grad(parameter).data.div_(torch.tensor(3.0))
        parameter.grad = grad(parameter).mul_(0.5)


def normalise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = grad(parameter).div_(grad(parameter).norm() + 1e-3)


def drop_some(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


ACTS: dict[str, Act] = {
    "clip": clip,
    "clip one by one": lambda m: clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "clip a part": lambda m: clip_grad_norm_(list(m.parameters())[1:4], 0.2),
    "clip by the largest": lambda m: clip_grad_norm_(m.parameters(), 0.1, norm_type=math.inf),
    "clip by the third norm": lambda m: clip_grad_norm_(m.parameters(), 0.1, norm_type=3.0),
    "clip in two calls": clip_in_two_calls,
    "clip values": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.05),
    "scale": lambda m: [grad(p).mul_(0.25 + i) for i, p in enumerate(m.parameters())],
    "scale data": scale_data,
    "normalise": normalise,
    "drop some": drop_some,
    "zero some": lambda m: [grad(p).zero_() for p in list(m.parameters())[::2]],
    "signs": lambda m: [grad(p).sign_() for p in m.parameters()],
    "zero a submodule": lambda m: m.get_submodule("layers.1").zero_grad(),
}


def forget_by_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


FORGET: dict[str, Act] = {
    "wrapper": lambda m: Wrapper(m).zero_grad(),
    "loop": forget_by_loop,
    "zeros": lambda m: Wrapper(m).zero_grad(set_to_none=False),
}


def compare(world: World, act: Act, forget: Act, **options: Any) -> None:
    """Three steps are those of one process; each over two backward passes on the mean of the ranks' losses."""
    model, plain = MLP(), MLP()
    optimizer, reference = sgd(model), sgd(plain)
    with world.zeroified(model, optimizer, **options):
        for step in range(3):
            for part in range(2):
                factor = step + part + 1
                loss: Loss = lambda m, rank, f=factor: m(f * mlp_input(rank)).square().mean()  # noqa: E731
                world.backward(model, plain, loss)
            for each, its_optimizer in ((model, optimizer), (plain, reference)):
                act(each)
                its_optimizer.step()
                forget(each)
        world.check_weights(model, plain, within=2e-6)


@STAGES
@pytest.mark.parametrize("act", ACTS)
def test_changes_of_gradients(world: World, stage, act):
    compare(world, ACTS[act], [*FORGET.values()][stage % 3], stage=stage, transport="auto")


@TRANSPORTS
@STAGES
@pytest.mark.parametrize("forget", FORGET.values(), ids=FORGET)
def test_ways_to_forget_gradients(world: World, stage, transport, forget):
    compare(world, lambda model: None, forget, stage=stage, transport=transport)


def _second_optimizer(model: nn.Module) -> None:
    with hpczero.gathered(model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


OF_ELEMENTS: dict[str, Act] = {
    "read": lambda m: grad(next(m.parameters())).isnan(),
    "noise": lambda m: grad(next(m.parameters())).add_(torch.ones(15, 7)),
    "assigned": lambda m: setattr(next(m.parameters()), "grad", torch.ones(15, 7)),
    "second optimizer": _second_optimizer,
}


@STAGES
@pytest.mark.parametrize("act", OF_ELEMENTS.values(), ids=OF_ELEMENTS)
def test_what_needs_elements_is_refused_by_name(world: World, stage, act):
    with world.mlp(sgd, stage=stage) as (model, _):
        model(mlp_input(world.rank)).sum().backward()
        said = r"parameter\.grad of 'layers\.0\.0\.weight'|is not the one that zeroify was given"
        with pytest.raises(StepError, match=said):
            act(model)


@STAGES
def test_gradients_that_are_not_reduced_yet(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        with hpczero.no_sync(model):
            model(mlp_input(world.rank)).sum().backward()
        with pytest.raises(StepError, match="not reduced over ranks"):
            grad(next(model.parameters())).mul_(2)
        with pytest.raises(StepError, match="never reduced over ranks"):
            clip_grad_norm_(model.parameters(), 1.0)


@STAGES
def test_there_is_no_gradient_before_backward_and_after_zero_grad(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        before = all(p.grad is None for p in model.parameters())
        model(mlp_input(world.rank)).sum().backward()
        there = all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        optimizer.zero_grad()
        world.check(before and there and all(p.grad is None for p in model.parameters()))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_copy_of_a_parameter_is_an_ordinary_one(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        model(mlp_input(world.rank)).sum().backward()
        twin = copy.deepcopy(next(model.parameters()))
        world.check(type(twin) is nn.Parameter and twin.grad is None)


def test_a_step_without_any_gradient_is_told_once(world: World, caplog):
    model = MLP()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING), world.zeroified(model, optimizer, stage=3):
        optimizer.step()
        optimizer.step()
    said = [record for record in caplog.records if "no parameter has a gradient" in record.message]
    world.check(len(said) == (1 if world.rank == 0 else 0))


@STAGES
def test_a_gradient_that_was_kept_over_zero_grad_is_refused(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        model(mlp_input(world.rank)).sum().backward()
        kept = [grad(parameter) for parameter in model.parameters()]
        model.zero_grad()
        model(2 * mlp_input(world.rank)).sum().backward()
        for act in (
            lambda: torch._foreach_norm(kept),
            lambda: kept[0].mul_(2),
            lambda: setattr(next(model.parameters()), "grad", kept[0]),
        ):
            with pytest.raises(StepError, match="was kept over a zero_grad"):
                act()


@STAGES
def test_a_gradient_that_came_after_none_is_not_thrown_away(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        weight, bias = list(model.parameters())[:2]
        weight.grad = None
        with hpczero.no_sync(model):
            model(mlp_input(world.rank)).sum().backward()
        bias.grad = None
        world.check(weight.grad is not None and bias.grad is None)


@STAGES
def test_setting_a_gradient_to_none_in_a_hook_that_comes_too_late_is_refused(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, _):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(StepError, match=r"before zeroify, or use parameter\.register_hook"):
            model(mlp_input(world.rank)).sum().backward()


@STAGES
def test_dropping_one_gradient_of_an_interrupted_backward(world: World, stage):
    model = MLP()
    optimizer = sgd(model)

    with world.zeroified(model, optimizer, stage=stage):
        handle = next(model.parameters()).register_hook(lambda gradient: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(mlp_input(world.rank)).sum().backward()
        handle.remove()
        list(model.parameters())[-1].grad = None
        world.raises(StepError, "did not finish", optimizer.step)
        forget_by_loop(model)
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()


def _other_parameters(model: nn.Module, rank: int) -> None:
    for parameter in model.get_submodule(f"layers.{rank}").parameters():
        parameter.grad = None


def _more_often(model: nn.Module, rank: int) -> None:
    for _ in range(rank + 1):
        for parameter in model.parameters():
            grad(parameter).mul_(0.5)


@STAGES
@pytest.mark.ranks(2)
@pytest.mark.parametrize("act", [_other_parameters, _more_often])
def test_changes_that_differ_between_ranks_are_refused(world: World, stage, act):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        act(model, world.rank)
        world.raises(StepError, "changes of parameter.grad|take the step", optimizer.step)


@STAGES
def test_a_model_that_was_frozen_for_a_while(world: World, stage):
    def freeze_and_look(model: nn.Module) -> None:
        model.requires_grad_(False)
        x = mlp_input(world.rank).requires_grad_()
        model(x).sum().backward()  # as a generator's step through its discriminator
        model(x.detach()).mean()
        model.requires_grad_(True)
        model.zero_grad()

    compare(world, lambda model: None, freeze_and_look, stage=stage)
