"""What loops do with ``optimizer.param_groups`` and ``optimizer.state``: torch's result, or a named error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, grad, mlp_input, sgd, squares, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]  # of three, one owns nothing

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Scaled(torch.optim.Optimizer):
    """SGD whose rate is scaled by an attribute of each parameter."""

    hpczero_elementwise = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = getattr(parameter, "lr_scale", 1.0)
                parameter.add_(grad(parameter), alpha=-group["lr"] * scale)


def _clip(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data = parameter.grad.data.clamp(-0.05, 0.05)


def _mask(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad[parameter.grad.abs() < 0.05] = 0.0
        parameter.grad[...] = parameter.grad[:] * 0.5


@STAGES
@pytest.mark.parametrize("act", [_clip, _mask, None])
@pytest.mark.parametrize("kind", [sgd, Scaled], ids=["SGD", "scaled by an attribute"])
def test_gradients_change_and_attributes_are_found_as_in_torch(world: World, stage, act, kind):
    def build() -> tuple[MLP, torch.optim.Optimizer]:
        model = MLP()
        for index, parameter in enumerate(model.parameters()):
            parameter.lr_scale = 1.0 + index  # type: ignore[attr-defined]
        return model, kind(model)

    plain, reference = build()
    model, optimizer = build()
    with world.zeroified(model, optimizer, stage=stage):
        for _ in range(3):
            world.backward(model, plain, squares)
            for each in (optimizer, reference):
                if act:
                    act(each)
                update(each)
        world.check_weights(model, plain, within=2e-6)


def _first(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


PIECES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "first element": lambda o: _first(o).grad[0].zero_(),
    "set of an element": lambda o: _first(o).grad.__setitem__(0, 0.0),
    "set_": lambda o: _first(o).grad.set_(torch.zeros(3)),
    "hook": lambda o: _first(o).register_hook(lambda g: g),
    "late hook": lambda o: _first(o).register_post_accumulate_grad_hook(lambda p: None),
    "data of another shape": lambda o: setattr(_first(o).grad, "data", torch.zeros(1)),
    "data of another piece": lambda o: setattr(
        _first(o).grad, "data", _first(o).grad.data.as_strided((1,), (1,), 1)
    ),
}


@STAGES
@pytest.mark.parametrize("name", PIECES)
def test_what_means_something_else_of_a_piece_is_refused(world: World, stage, name):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        with pytest.raises(StepError, match=r"optimizer\.param_groups"):
            PIECES[name](optimizer)
        optimizer.step()


@STAGES
def test_pieces_that_are_frozen_are_refused_at_the_step(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.requires_grad_(False)
        world.raises(StepError, "requires_grad of the part of .* is False", optimizer.step)


STATES: dict[str, Callable[[torch.optim.Optimizer, nn.Parameter], object]] = {
    "set": lambda o, p: o.state.__setitem__(p, {}),
    "read": lambda o, p: o.state[p],
    "pop": lambda o, p: o.state.pop(p, None),
    "get": lambda o, p: o.state.get(p),
    "in": lambda o, p: p in o.state,
    "update": lambda o, p: o.state.update({p: {}}),
    "|=": lambda o, p: o.state.__ior__({p: {}}),
    "setdefault": lambda o, p: o.state.setdefault(p, {}),
    "del": lambda o, p: o.state.__delitem__(p),
}


@STAGES
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("loaded", [False, True])
def test_state_of_a_parameter_of_the_model_is_refused(world: World, stage, name, loaded):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()
        if loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(StepError, match="a parameter of the model, of shape"):
            STATES[name](optimizer, next(model.parameters()))
        assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
        for shard in optimizer.param_groups[0]["params"]:
            optimizer.state[shard] = {}
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()


@STAGES
def test_a_state_of_the_users_own_is_watched_from_the_next_step_on(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        parameter = next(model.parameters())
        optimizer.state = defaultdict(dict)
        assert optimizer.state[parameter] == {}  # as plain torch's own, where it is looked for
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()
        with pytest.raises(StepError, match="a parameter of the model, of shape"):
            optimizer.state[parameter] = {}
        moments = {"momentum_buffer": torch.ones(parameter.shape)}
        optimizer.state = defaultdict(dict, {parameter: moments})
        world.raises(StepError, "optimizer.state holds", optimizer.step)


class WithItsOwnList(torch.optim.SGD):
    """Moves the model's parameters that it was built with, beside those in its groups."""

    hpczero_elementwise = True

    def __init__(self, model: nn.Module) -> None:
        self.own = list(model.parameters())
        super().__init__(self.own, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        super().step()
        for parameter in self.own:
            parameter.mul_(0.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_an_optimizer_that_changes_more_than_its_groups_is_refused(world: World, stage, transport):
    with world.mlp(WithItsOwnList, stage=stage, transport=transport) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        with pytest.raises(StepError, match="was changed in place since zeroify"):
            optimizer.step()


RATES: dict[str, Callable[[float], dict[str, Any]]] = {
    "NumPy": lambda x: {"lr": np.float32(x)},
    "tensor": lambda x: {"lr": torch.tensor(1.0 + 1e-6 * x)},
    "list": lambda x: {"betas": [0.5, x]},
    "mapping": lambda x: {"mine": {"a": x}},
}


@STAGES
@pytest.mark.parametrize("name", RATES)
def test_options_of_any_plain_type_that_differ_are_refused(world: World, stage, name):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        optimizer.param_groups[0].update(RATES[name](0.5))
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0].update(RATES[name](0.5 + 0.25 * (world.rank == 1)))
        model(mlp_input(world.rank)).sum().backward()
        if world.size > 1:
            world.raises(StepError, "where rank 0 has", optimizer.step)
