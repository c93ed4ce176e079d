"""The state of an optimizer whose update is over long tensors: what programs do to it counts, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hpczero
from tests.helpers.small_models import MLP, same
from tests.helpers.world import World
from tests.zero.parts_models import Branches, groups_of, lengths_stepped_on, train

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])


def states(optimizer: torch.optim.Optimizer, group: int = 0) -> list[Any]:
    return [optimizer.state[parameter] for parameter in optimizer.param_groups[group]["params"]]


def _made_of_parameters(optimizer: torch.optim.Optimizer) -> None:
    """As loops make state: like the parameters that the optimizer shows."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def _other_memory(optimizer: torch.optim.Optimizer) -> None:
    """What torch does not count."""
    for state in states(optimizer):
        state["exp_avg"].data = torch.zeros_like(state["exp_avg"])
        state["exp_avg_sq"].set_(state["exp_avg_sq"] * 2.0)


def _counters_past_versions(optimizer: torch.optim.Optimizer) -> None:
    """Some of the counters that were equal, changed in ways that torch does not count."""
    for state in states(optimizer, 1):
        state["step"].numpy()[()] = 1.0
    for state in states(optimizer):
        state["step"].data = torch.tensor(2.0)


def _to_and_fro(optimizer: torch.optim.Optimizer) -> None:
    """To another device and back, as is found everywhere; and what is there then is the state."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _own_dtype(optimizer: torch.optim.Optimizer) -> None:
    """Tensors of a program's own, some of another dtype."""
    for group, dtype in enumerate((torch.bfloat16, torch.float32)):
        for state in states(optimizer, group):
            state["third"] = torch.full_like(state["exp_avg"], 1 / 3, dtype=dtype)


EDITS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "made of parameters": _made_of_parameters,
    "other memory": _other_memory,
    "counters past versions": _counters_past_versions,
    "to and fro": _to_and_fro,
    "own dtype": _own_dtype,
    "reset": lambda o: [o.state.pop(p, None) for p in o.param_groups[0]["params"]],
    "begin counting again": lambda o: [state["step"].zero_() for state in states(o, 1)],
    "other tensors": lambda o: [s.update(exp_avg=s["exp_avg"] * 0.5) for s in states(o)],
    "in place": lambda o: [s["exp_avg_sq"].mul_(2.0) for n in (0, 1) for s in states(o, n)],
    "round trip": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "a group that steps no more": lambda o: o.param_groups[1].update(params=[]),
    "in another order": lambda o: o.param_groups[0]["params"].reverse(),
    "an entry of the user's": lambda o: [state.update(seen=[1]) for state in states(o)],
}


@STAGES
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_a_loop_does_to_the_state_counts(world: World, stage, edit):
    model, plain = Branches(), Branches()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    reference = torch.optim.AdamW(groups_of(plain), lr=0.01)
    with world.zeroified(model, optimizer, stage=stage, transport="flat"):
        for steps in (range(4), range(4, 8)):
            train(model, optimizer, world.own, steps)
            train(plain, reference, range(world.size), steps)
            if steps.start == 0:
                edit(optimizer)
                edit(reference)
        world.check_weights(model, plain, within=2e-5)


def test_references_into_the_state_stay_those_of_the_state(world: World):
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mine = world.own
    with world.zeroified(model, optimizer, stage=1, transport="flat"):
        train(model, optimizer, mine, range(3))
        pieces = optimizer.param_groups[0]["params"]
        held = [optimizer.state[piece]["momentum_buffer"] for piece in pieces]
        own = [torch.zeros(piece.shape) for piece in pieces]
        for piece, tensor in zip(pieces, own, strict=True):
            optimizer.state[piece]["mine"] = tensor
        if pieces:
            optimizer.state[pieces[0]].clear()
        train(model, optimizer, mine, range(3, 6))
        kept = all(
            optimizer.state[piece]["momentum_buffer"] is buffer
            for piece, buffer in zip(pieces[1:], held[1:], strict=True)
        )
        world.check(kept, "momentum")
        kept = all(
            optimizer.state[piece]["mine"] is tensor
            for piece, tensor in zip(pieces[1:], own[1:], strict=True)
        )
        world.check(kept, "a tensor of the program's")


def test_what_was_loaded_is_stepped_on_as_before(world: World, folder, monkeypatch):
    """Else a run that goes on would be slower, and with fused kernels have other bits, than one without a stop."""
    lengths = lengths_stepped_on(monkeypatch)
    mine = world.own
    seen: list[list[int]] = []
    values: list[list[Tensor]] = []
    for way in ("straight", "state_dict", "checkpoint"):
        model = MLP()
        optimizer = torch.optim.Adam(groups_of(model), lr=0.01, fused=True)
        with world.zeroified(model, optimizer, stage=3, transport="flat") as sharding:
            train(model, optimizer, mine, range(3))
            optimizer.zero_grad()
            if way == "state_dict":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif way == "checkpoint":
                hpczero.checkpoint.save(folder, model, step=3)
                train(model, optimizer, mine, range(3, 5))
                optimizer.zero_grad()
                hpczero.checkpoint.load(folder, model)
            lengths.clear()
            train(model, optimizer, mine, range(3, 5))
            seen.append([length for call in lengths for length in call])
            values.append([unit.gather_values() for unit in sharding.units])
    world.check(seen[0] == seen[1] == seen[2], f"{seen}")
    for other in values[1:]:
        world.check(same(values[0], other), "other bits")
