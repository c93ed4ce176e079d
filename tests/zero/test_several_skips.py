"""Several optimizers and gradients that are not finite: who skips, what stays, and how often the loss scale is told."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import Optimizer

import hpczero
from hpczero import Precision
from hpczero.errors import StepError
from hpczero.plan.precision import LossScale
from tests.helpers.small_models import MLP, mlp_backward, mlp_input, update
from tests.helpers.world import World
from tests.zero.several_models import TOLERANCE, by_shape, loss_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FP16 = Precision(param="fp16", loss_scale=LossScale(initial=8.0, growth_interval=3))
KINDS = {"fp16": FP16, "bf16": Precision(param="bf16", nonfinite="skip")}
PRECISIONS = pytest.mark.parametrize("precision", KINDS.values(), ids=KINDS.keys())


def poison(model: MLP, world: World, name: str = "") -> None:
    """A backward after which the last rank's gradient of one parameter, or of the loss, is infinite."""
    factor = math.inf if world.rank == world.size - 1 else 1.0
    if not name:
        (model(mlp_input(world.rank)).sum() * factor).backward()
        return
    hook = model.get_parameter(name).register_hook(lambda gradient: gradient * factor)
    mlp_backward(model, world.rank)
    hook.remove()


def values(sharding: hpczero.Sharding) -> dict[str, list[torch.Tensor]]:
    """What this rank's pieces hold, by the kind of parameter: that of the optimizers of ``by_shape``."""
    found = {}
    for name, optimizer in zip(("matrices", "vectors"), sharding.optimizers, strict=True):
        with torch._C.DisableTorchFunctionSubclass():
            held = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
        found[name] = [each.as_subclass(torch.Tensor) for each in held]
    return found


def changed(
    before: dict[str, list[torch.Tensor]], after: dict[str, list[torch.Tensor]]
) -> set[str]:
    return {n for n in before if not all(map(torch.equal, before[n], after[n]))}


class Watched:
    """Which kinds of parameters change, over all ranks, and what of the counts and the scale does."""

    def __init__(self, world: World, sharding: hpczero.Sharding) -> None:
        self.world, self.sharding = world, sharding

    def step(self, optimizer: Optimizer) -> tuple[set[str], int, float]:
        """Returns what changed by a step, and how many were skipped and the loss scale after it."""
        before = values(self.sharding)
        optimizer.step()
        mine = changed(before, values(self.sharding))
        everywhere = set().union(*self.world.comm.allgather(mine))
        return everywhere, self.sharding.skipped_steps, self.sharding.loss_scale


@STAGES
@PRECISIONS
@pytest.mark.parametrize("where", ["", "layers.1.0.weight", "layers.1.0.bias"])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_overflow_skips_both_and_halves_the_scale_once(
    world: World, stage, precision, where, swapped
):
    with world.mlp(by_shape, stage=stage, precision=precision) as (model, optimizers):
        sharding = hpczero.sharding(model)
        watched, begin = Watched(world, sharding), sharding.loss_scale
        halved = begin / 2 if precision.loss_scale else begin
        order = optimizers[::-1] if swapped else optimizers
        poison(model, world, where)
        found = [watched.step(optimizer) for optimizer in order]
        world.check(found == [(set(), 1, halved)] * 2, found)
        model.zero_grad()
        mlp_backward(model, world.rank)
        found = [watched.step(optimizer) for optimizer in optimizers]
        expected = [({"matrices"}, 1, halved), ({"vectors"}, 1, halved)]
        world.check(found == expected, found)


@STAGES
def test_good_steps_of_one_backward_count_once_for_the_scale(world: World, stage):
    with world.mlp(by_shape, stage=stage, precision=FP16) as (model, optimizers):
        sharding = hpczero.sharding(model)
        scales = []
        for _ in range(7):
            model.zero_grad()
            mlp_backward(model, world.rank)
            for optimizer in optimizers:
                optimizer.step()
            scales.append(sharding.loss_scale)
        expected = [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]
        world.check(scales == expected, scales)


@STAGES
@PRECISIONS
def test_one_that_waits_skips_its_own_step_later_and_nobody_elses(world: World, stage, precision):
    """Its gradients hold infinity until then, as in plain torch."""
    with world.mlp(by_shape, stage=stage, precision=precision) as (model, (first, second)):
        sharding = hpczero.sharding(model)
        watched, begin = Watched(world, sharding), sharding.loss_scale
        scale = begin / 2 if precision.loss_scale else begin
        poison(model, world)
        found = [watched.step(first)]
        first.zero_grad()
        mlp_backward(model, world.rank)
        found.append(watched.step(first))
        found.append(watched.step(second))
        second.zero_grad()
        first.zero_grad()
        mlp_backward(model, world.rank)
        found += [watched.step(second), watched.step(first)]
        expected = [
            (set(), 1, scale),
            ({"matrices"}, 1, scale),
            (set(), 2, scale),
            ({"vectors"}, 2, scale),
            ({"matrices"}, 2, scale),
        ]
        world.check(found == expected, found)


@STAGES
@pytest.mark.parametrize("in_place", [False, True])
def test_one_that_waits_steps_again_once_its_gradients_were_zeroed(world: World, stage, in_place):
    with world.mlp(by_shape, stage=stage, precision=FP16) as (model, (first, second)):
        watched = Watched(world, hpczero.sharding(model))
        poison(model, world)
        first.step()
        second.zero_grad(set_to_none=not in_place)
        mlp_backward(model, world.rank)
        found = [watched.step(second), watched.step(first)]
        expected = [({"vectors"}, 1, 4.0), ({"matrices"}, 1, 4.0)]
        world.check(found == expected, found)


@STAGES
def test_gradients_of_one_that_waits_are_kept_through_the_skip_of_another(world: World, stage):
    """What overflowed was the other's alone: both backwards count, as in plain torch."""
    with world.mlp(by_shape, stage=stage, precision=FP16) as (model, (first, _)):
        poison(model, world, "layers.2.0.weight")
        update(first)
        before = hpczero.full_gradients(model)["layers.2.0.bias"].clone()
        mlp_backward(model, world.rank)
        after = hpczero.full_gradients(model)["layers.2.0.bias"]
        world.check(torch.allclose(after, 2 * before, rtol=1e-2), f"{before} {after}")
        world.check(bool(before.any()))


@STAGES
def test_without_a_loss_scale_it_is_an_error_on_all_ranks_whoever_steps(world: World, stage):
    with world.mlp(by_shape, stage=stage) as (model, (first, second)):
        sharding = hpczero.sharding(model)
        before = values(sharding)
        poison(model, world, "layers.1.0.bias")
        for optimizer in (first, second, first):
            world.raises(StepError, "mean gradient has NaN or infinity", optimizer.step)
        world.check(not changed(before, values(sharding)))
        model.zero_grad()
        mlp_backward(model, world.rank)
        first.step()
        second.step()
        everywhere = set().union(*world.comm.allgather(changed(before, values(sharding))))
        world.check(everywhere == {"matrices", "vectors"})


def test_too_many_skips_in_a_row_count_backwards_not_steps(world: World):
    precision = Precision(nonfinite="skip", max_skips=3)
    with world.mlp(by_shape, precision=precision) as (model, optimizers):
        sharding = hpczero.sharding(model)
        for _ in range(2):
            poison(model, world)
            for optimizer in optimizers:
                optimizer.step()
        world.check(sharding.skipped_steps == 2)
        poison(model, world)
        world.raises(StepError, "3 steps in a row were skipped", optimizers[1].step)


def test_parts_of_accumulate_survive_zero_grad_of_one_optimizer(world: World):
    model, plain = MLP(), MLP()
    optimizers, references = by_shape(model), by_shape(plain)
    with world.zeroified(model, optimizers):
        with hpczero.accumulate(model, 0, 2):
            loss_of(model, world.rank, 0).backward()
        optimizers[1].zero_grad()
        with hpczero.accumulate(model, 1, 2):
            loss_of(model, world.rank, 1).backward()
        for part in range(2):
            if part:
                references[1].zero_grad()
            for rank in range(world.size):
                (loss_of(plain, rank, part) / (2 * world.size)).backward()
        for optimizer in (*optimizers, *references):
            optimizer.step()
        world.check_weights(model, plain, within=TOLERANCE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with hpczero.accumulate(model, 0, 2):
            loss_of(model, world.rank, 0).backward()
        for optimizer in optimizers:  # both: the parts begin anew
            optimizer.zero_grad()
        with hpczero.accumulate(model, 0, 1):
            loss_of(model, world.rank, 0).backward()
