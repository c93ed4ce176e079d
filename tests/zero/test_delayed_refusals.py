"""What goes wrong with a delayed update: one error on all ranks; and what cannot be right, refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpczero
from hpczero.errors import PlanError, StepError, TierError
from tests.helpers.small_models import MLP, adamw, mlp_input
from tests.helpers.world import World
from tests.zero.late_steps import OFFLOAD, backward, delayed, take_steps

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


@pytest.mark.parametrize("kind", [TierError, ValueError])
def test_what_fails_on_the_thread_is_an_error_of_the_next_step(
    world: World, folder, monkeypatch, kind
):
    with delayed(world) as (_, model, optimizer):
        sharding = hpczero.sharding(model)
        take_steps(model, optimizer, world.rank, range(2))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(2)
        take_steps(model, optimizer, world.rank, range(2, 5))
        expected = hpczero.full_state_dict(model)
        saved.load()
        update: Any = sharding.step.steppers[0].update
        do = update._do
        done: list[int] = []

        def failing(task: Any, twin: Any) -> None:
            done.append(1)
            if len(done) == 2:
                raise kind("no more")
            do(task, twin)

        with monkeypatch.context() as patch:
            if world.rank == world.size - 1:
                patch.setattr(update, "_do", failing)
            take_steps(model, optimizer, world.rank, range(2, 3))
            backward(model, world.rank, 3)
            wanted: Any = TierError if kind is TierError else StepError
            world.raises(wanted, "delayed update.*no more", optimizer.step)
        world.raises(StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        optimizer.zero_grad()
        saved.load()
        take_steps(model, optimizer, world.rank, range(2, 5))
        found = hpczero.full_state_dict(model)
        world.check_state(found, expected)


def clear_each(optimizer: torch.optim.Optimizer) -> None:
    for state in dict.values(optimizer.state):
        state.clear()


def count_on(optimizer: torch.optim.Optimizer) -> None:
    for state in dict.values(optimizer.state):
        state["step"] = state["step"] + 1


CHANGES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "clear each": clear_each,
    "count": count_on,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_state_that_changes_under_an_update_is_refused(world: World, folder, change):
    with delayed(world) as (_, model, optimizer):
        take_steps(model, optimizer, world.rank, range(2))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(2)
        change(optimizer)
        take_steps(model, optimizer, world.rank, range(2, 4))
        change(optimizer)
        backward(model, world.rank, 4)
        world.raises(StepError, "finish_update", optimizer.step)
        optimizer.zero_grad()
        saved.load()
        take_steps(model, optimizer, world.rank, range(2, 4))


def test_whole_parameters_inside_a_call_are_refused_while_an_update_is_on_its_way(world: World):
    with delayed(world) as (_, model, optimizer):
        take_steps(model, optimizer, world.rank, range(2))

        def look(*_: Any) -> None:
            with hpczero.gathered(model):
                pytest.fail("it is not whole")

        handle = model.layers[1].register_forward_hook(look)
        world.raises(StepError, "finish_update", lambda: model(mlp_input(world.rank)))
        handle.remove()
        take_steps(model, optimizer, world.rank, range(2, 4))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": "device"}, "delayed with step device"),
        ({"gradients": "device"}, "delayed with gradients on device"),
        ({"parameters": "host"}, "delayed with parameters on host"),
        ({"fraction": 0.5}, "delayed with fraction 0.5"),
    ],
)
def test_a_delay_that_cannot_be_right_is_refused(world: World, changes, text):
    offload = dataclasses.replace(OFFLOAD, **changes)
    model = MLP()
    world.refuses(PlanError, text, model, adamw(model), offload=offload)


def test_several_optimizers_are_refused(world: World):
    model = MLP()
    first, *others = model.parameters()
    both = (torch.optim.AdamW([first]), torch.optim.AdamW(others))
    start = world.zeroified(model, both, offload=OFFLOAD).__enter__
    world.raises(PlanError, "2 optimizers, expected one", start)
