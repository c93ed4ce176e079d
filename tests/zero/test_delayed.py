"""The delayed update: the recurrence of an update that is one step late, to the last bit, and nothing in between.

The reference is plain torch over the same batches: gradients of every rank's batch are averaged as the ranks average
them, and each gradient is stepped on one batch later than it was made.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.zero.update.streamed import DelayedUpdate
from tests.helpers import late
from tests.helpers.small_models import MLP, adamw, mlp_input, same_state, update
from tests.helpers.world import World
from tests.zero.late_steps import (
    MAKERS,
    SIZES,
    Late,
    backward,
    check_late,
    delayed,
    expect_steps,
    gradients_of,
    take_steps,
    weights_now,
)

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_step_shows_the_update_of_the_one_before(
    world: World, stage, make, clip, parts, precision
):
    """Weights after every step, with a scheduler, against plain torch; the last update comes with ``finish_update``."""

    def right() -> bool:
        wanted = expected.weights
        if precision == "bf16":
            wanted = {name: value.bfloat16().float() for name, value in wanted.items()}
        return same_state(wanted, weights_now(model))

    with delayed(world, make, stage=stage, precision=precision) as (expected, model, optimizer):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(5):
            gradients = gradients_of(world, expected.weights, step, clip, parts, precision)
            for part in range(parts):
                with hpczero.accumulate(model, part, parts):
                    backward(model, world.rank, step + 100 * part)
            if clip is not None:
                hpczero.clip_grad_norm_(model, clip)
            update(optimizer)
            expected.step(gradients, optimizer.param_groups[0]["lr"])
            scheduler.step()
            world.check(right(), f"other weights, step {step}")
        hpczero.finish_update(model)
        expected.finish()
        world.check(right(), "other weights at the end")
        hpczero.finish_update(model)  # there is nothing more
        world.check(right(), "an update was taken twice")


def whole(model: nn.Module) -> dict[str, Tensor]:
    with hpczero.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def released(model: nn.Module) -> dict[str, Tensor]:
    hpczero.release(model, whole=True)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    hpczero.zeroify(model, None, topology=hpczero.Topology.of_world())  # to be released once more
    return found


@pytest.mark.parametrize("read", [hpczero.full_state_dict, whole, released])
def test_whoever_reads_the_weights_reads_all_updates(world: World, read):
    with delayed(world) as (expected, model, optimizer):
        take_steps(model, optimizer, world.rank, range(3))
        expect_steps(expected, world, range(3))
        check_late(world, expected, model)
        expected.finish()
        found = read(model)
        world.check_state(found, expected.weights)


def test_a_program_may_change_values_between_steps(world: World):
    with delayed(world) as (expected, model, optimizer):
        for first in (0, 2, 4):
            take_steps(model, optimizer, world.rank, range(first, first + 2))
            expect_steps(expected, world, range(first, first + 2))
            expected.finish()
            with hpczero.gathered(model, modifier_rank=0):
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
            with torch.no_grad():
                for parameter in expected.model.parameters():
                    parameter.mul_(0.9)
        check_late(world, expected, model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_has_all_updates_and_goes_on_alike(world: World, folder, precision, background):
    """The run that has saved and the one that loads are both without an update on its way."""
    ends = []
    with delayed(world, precision=precision) as (_, model, optimizer):
        take_steps(model, optimizer, world.rank, range(3))
        with hpczero.checkpoint.Checkpoints(folder, model, background=background) as checkpoints:
            checkpoints.save(3)
            take_steps(model, optimizer, world.rank, range(3, 6))
        ends.append(hpczero.full_state_dict(model))
    with delayed(world, precision=precision) as (_, model, optimizer):
        take_steps(model, optimizer, world.rank, range(2))  # one is on its way when it is loaded
        hpczero.checkpoint.load(folder, model)
        take_steps(model, optimizer, world.rank, range(3, 6))
        ends.append(hpczero.full_state_dict(model))
    world.check_state(*ends)
    if precision == "fp32":
        expected = Late(MAKERS["AdamW fused"])
        expect_steps(expected, world, range(3))
        expected.finish()
        model = MLP(SIZES)
        with world.zeroified(model, adamw(model), stage=1):
            hpczero.checkpoint.load(folder, model)
            found = hpczero.full_state_dict(model)
        world.check_state(found, expected.weights)


def test_a_step_that_is_skipped_still_shows_the_one_before(world: World):
    precision = hpczero.Precision(nonfinite="skip")
    with delayed(world, precision=precision) as (expected, model, optimizer):
        for step in range(6):
            bad = step in (2, 3)
            gradients = gradients_of(world, expected.weights, step)
            backward(model, world.rank, step, scale=float("inf") if bad else 1.0)
            update(optimizer)
            expected.step(None if bad else gradients, 1e-2)
            check_late(world, expected, model, step)
        assert hpczero.sharding(model).skipped_steps == 2


def test_gradients_that_nobody_drops_are_added_to(world: World):
    """While the thread still reads them."""
    total: dict[str, Tensor] | None = None
    with delayed(world) as (expected, model, optimizer):
        for step in range(5):
            new = gradients_of(world, expected.weights, step)
            total = new if total is None else {name: total[name] + new[name] for name in new}
            backward(model, world.rank, step)
            world.check(same_state(total, hpczero.full_gradients(model)), "another sum")
            optimizer.step()
            expected.step(total, 1e-2)
            check_late(world, expected, model, step)


def test_the_next_batch_is_computed_while_the_host_steps(world: World, monkeypatch):
    """The thread may not even begin before the next forward has ended: nobody waits for it until then."""
    go = threading.Event()
    do = DelayedUpdate._do

    def held_back(self: Any, task: Any, twin: Any) -> None:
        assert go.wait(60), "the program waits for the thread"
        do(self, task, twin)

    monkeypatch.setattr(DelayedUpdate, "_do", held_back)
    monkeypatch.setattr(late, "LATE_S", 3e-3)
    with delayed(world) as (expected, model, optimizer):
        for step in range(4):
            x = mlp_input(world.rank + 7 * step)
            loss = model(x).square().mean()
            go.set()
            loss.backward()
            optimizer.step()
            go.clear()
            optimizer.zero_grad()
        go.set()
        expect_steps(expected, world, range(4))
        hpczero.finish_update(model)
        expected.finish()
        check_late(world, expected, model)


def test_the_late_twin_sees_a_wait_that_is_missing(world: World, monkeypatch):
    """In fp32 values are sent from where the thread steps on them: it must wait until they are on their way."""
    monkeypatch.setattr(late, "LATE_S", 20e-3)
    do = DelayedUpdate._do

    def hasty(self: Any, task: Any, twin: Any) -> None:
        task.sent = None
        do(self, task, twin)

    differ = []
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(DelayedUpdate, "_do", hasty)
        with delayed(world) as (expected, model, optimizer):
            take_steps(model, optimizer, world.rank, range(3))
            expect_steps(expected, world, range(3))
            differ.append(not same_state(expected.weights, weights_now(model)))
    world.check(differ == [False, True], differ)
