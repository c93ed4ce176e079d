"""``optimizer.state`` where it rests on a tier: what a program does to it is done, or refused by name.

A loop that goes through the state of a plain optimizer finds momenta there. Where they rest elsewhere, it must not find
a part of them and believe that this is all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_steps
from tests.helpers.world import World
from tests.zero.away_steps import on

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

HOST = on("host")


def check_bits(world: World, loop: Callable[[nn.Module, Any], object], make: Any = adamw) -> None:
    """``loop`` of a model and its optimizer leaves the bits of memory."""
    found = []
    for offload in (None, HOST):
        with world.mlp(make, offload=offload) as (model, optimizer):
            loop(model, optimizer)
            found.append(hpczero.full_state_dict(model))
    world.check_state(*found)


def zero_by_name(state: Any) -> None:
    for name in state:
        state[name].zero_()


IDIOMS: dict[str, Callable[[Any], object]] = {
    "values": lambda state: [value.zero_() for value in state.values()],
    "items": lambda state: [value.zero_() for _, value in state.items()],
    "in": lambda state: "exp_avg" in state and state["exp_avg"].zero_(),
    "get": lambda state: state.get("exp_avg"),
    "names": zero_by_name,
    "pop": lambda state: state.pop("exp_avg", None),
    "del": lambda state: state.__delitem__("exp_avg"),
    "none": lambda state: state.__setitem__("exp_avg", None),
    "set": lambda state: state.__setitem__("exp_avg", torch.zeros(3)),
    "update": lambda state: state.update(exp_avg=torch.zeros(3)),
    "setdefault": lambda state: state.setdefault("exp_avg", 0),
    "dict": dict,
    "copy": lambda state: state.copy(),
    "stars": lambda state: {**state},
}


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS.keys())
def test_no_loop_over_the_state_leaves_out_what_rests_elsewhere(world: World, idiom):
    with world.mlp(adamw, stage=3, offload=HOST) as (model, optimizer):
        mlp_steps(model, optimizer, world.rank)
        for piece in optimizer.param_groups[0]["params"]:
            if piece.numel():
                with pytest.raises(StepError, match="rests on a memory tier"):
                    idiom(optimizer.state[piece])
            numbers = optimizer.state[piece]
            assert float(numbers["step"]) == (0.0 if idiom is zero_by_name else 1.0)
        world.comm.Barrier()


def clear(optimizer: Any, every: int) -> None:
    """The state of each piece, or of some."""
    for piece in optimizer.param_groups[0]["params"][::every]:
        optimizer.state[piece].clear()


def set_steps(optimizer: Any) -> None:
    for piece in optimizer.param_groups[0]["params"]:
        optimizer.state[piece]["step"] += 7


CHANGES: dict[str, Callable[[Any], object]] = {
    "clear each": lambda optimizer: clear(optimizer, 1),
    "clear some": lambda optimizer: clear(optimizer, 2),
    "clear": lambda optimizer: optimizer.state.clear(),
    "steps": set_steps,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_state_is_that_of_memory(world: World, change):
    def loop(model: nn.Module, optimizer: Any) -> None:
        mlp_steps(model, optimizer, world.rank, 3)
        change(optimizer)
        mlp_steps(model, optimizer, world.rank, 2)

    check_bits(world, loop)


def test_a_checkpoint_has_the_state_that_a_program_has_given(world: World, folder):
    """New state for each piece, as a program gives it that keeps state of its own."""

    def loop(model: nn.Module, optimizer: Any) -> None:
        mlp_steps(model, optimizer, world.rank, 2)
        for piece in optimizer.param_groups[0]["params"]:
            moment = torch.full(piece.shape, 0.25)
            state = {"step": torch.tensor(4.0), "exp_avg": moment, "exp_avg_sq": 2 * moment}
            optimizer.state[piece] = state
        where = folder / ("memory" if hpczero.sharding(model).away.store is None else "tier")
        hpczero.checkpoint.Checkpoints(where, model).save(2)
        mlp_steps(model, optimizer, world.rank)
        hpczero.checkpoint.load(where, model)
        mlp_steps(model, optimizer, world.rank, 2)

    check_bits(world, loop)


def test_state_of_another_size_is_refused(world: World):
    with world.mlp(adamw, offload=HOST) as (model, optimizer):
        mlp_backward(model, world.rank)
        for piece in optimizer.param_groups[0]["params"]:
            optimizer.state[piece] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1)}
        world.raises(StepError, "'exp_avg'.* 1 element", optimizer.step)


NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "foreach": True}
IN_PLACE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, **NESTEROV),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_what_an_optimizer_does_to_gradients_is_in_the_next_sum(world: World, make):
    """Torch's own step over lists works on gradients in place, and a loop may add to them."""

    def loop(model: nn.Module, optimizer: Any) -> None:
        for step in range(6):
            mlp_backward(model, world.rank)
            if step % 2:
                hpczero.clip_grad_norm_(model, 0.05)
            optimizer.step()
            hpczero.clip_grad_norm_(model, 0.02)

    check_bits(world, loop, make)


def test_parameters_of_no_model_that_come_after_zeroify_are_named_as_that(world: World):
    with world.mlp(adamw, stage=3, offload=HOST) as (model, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        mlp_backward(model, world.rank)
        world.raises(StepError, "that are not of this model", optimizer.step)


def test_a_step_that_was_cut_off_gives_its_staging_back(world: World, folder, monkeypatch):
    """Of many windows, as often as there are blocks; a checkpoint then goes on with the bits of a run without it."""
    model = MLP((7, 130, 131, 3))
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=3, offload=HOST) as sharding:
        mlp_steps(model, optimizer, world.rank)
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(1)
        mlp_steps(model, optimizer, world.rank)
        expected = hpczero.full_state_dict(model)
        update: Any = sharding.step.steppers[0].update
        method = update._method
        for attempt in range(6):
            saved.load()
            calls: list[int] = []

            def failing(optimizer: Any, calls: list[int] = calls, last: int = attempt) -> None:
                calls.append(1)
                if len(calls) > last % 3:
                    raise ValueError("cut off")
                method(optimizer)

            mlp_backward(model, world.rank)
            with monkeypatch.context() as patch:
                patch.setattr(update, "_method", failing)
                patch.setattr(update, "check", lambda **_: None)
                with pytest.raises(Exception, match="cut off"):
                    optimizer.step()
            optimizer.zero_grad()
        saved.load()
        mlp_steps(model, optimizer, world.rank)
        world.check_state(hpczero.full_state_dict(model), expected)
