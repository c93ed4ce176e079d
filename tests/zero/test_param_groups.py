"""What loops do with ``optimizer.param_groups`` and ``optimizer.state``: torch's result, or a named error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from hpczero.errors import StepError
from tests.helpers.small_models import (
    MLP,
    check_weights,
    grad,
    mlp_input,
    raises_on_all,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]  # of three, one owns nothing

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Scaled(torch.optim.Optimizer):
    """SGD whose rate is scaled by an attribute of each parameter."""

    hpczero_elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

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


def _all_of_it(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad[...] = parameter.grad[:] * 0.5


def _nothing(optimizer: torch.optim.Optimizer) -> None:
    return


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@STAGES
@pytest.mark.parametrize("act", [_clip, _mask, _all_of_it, _nothing], ids=lambda a: a.__name__)
@pytest.mark.parametrize("kind", [_momentum, Scaled], ids=["SGD", "scaled by an attribute"])
def test_gradients_are_changed_and_attributes_found_as_in_plain_torch(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    act: Callable[..., None],
    kind: Callable[[Any], torch.optim.Optimizer],
) -> None:
    def build() -> tuple[MLP, torch.optim.Optimizer]:
        model = MLP()
        for index, parameter in enumerate(model.parameters()):
            parameter.lr_scale = 1.0 + index  # type: ignore[attr-defined]
        return model, kind(model.parameters())

    plain, reference = build()
    model, optimizer = build()
    with zeroified(model, optimizer, stage=stage, topology=topology):
        for _ in range(3):
            losses = [plain(mlp_input(rank)).square().mean() for rank in range(comm.size)]
            torch.stack(losses).mean().backward()
            act(reference)
            reference.step()
            reference.zero_grad()
            model(mlp_input(comm.rank)).square().mean().backward()
            act(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        check_weights(comm, model, plain, within=2e-6)


def _first(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


PIECES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "first element": lambda o: _first(o).grad[0].zero_(),
    "first rows": lambda o: _first(o).grad[:2].zero_(),
    "set of an element": lambda o: _first(o).grad.__setitem__(0, 0.0),
    "chunks": lambda o: _first(o).grad.chunk(2),
    "roll": lambda o: _first(o).grad.roll(1),
    "softmax": lambda o: _first(o).grad.softmax(0),
    "largest of lists": lambda o: torch._foreach_max([_first(o).grad]),
    "mse": lambda o: nn.functional.mse_loss(_first(o), _first(o).grad),
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
def test_what_means_something_else_of_a_piece_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int, name: str
) -> None:
    model = MLP()
    optimizer = _momentum(model.parameters())
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        with pytest.raises(StepError, match=r"optimizer\.param_groups"):
            PIECES[name](optimizer)
        optimizer.step()


@STAGES
def test_pieces_that_are_frozen_are_refused_at_the_step(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = _momentum(model.parameters())
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.requires_grad_(False)
        raises_on_all(comm, StepError, "requires_grad of the part of .* is False", optimizer.step)


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
def test_state_of_a_parameter_of_the_model_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int, name: str, loaded: bool
) -> None:
    model = MLP()
    optimizer = _momentum(model.parameters())
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()
        if loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(StepError, match="a parameter of the model, of shape"):
            STATES[name](optimizer, next(model.parameters()))
        assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
        for shard in optimizer.param_groups[0]["params"]:
            optimizer.state[shard] = {}
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()


@STAGES
def test_a_state_of_the_users_own_is_watched_from_the_next_step_on(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = _momentum(model.parameters())
    parameter = next(model.parameters())
    with zeroified(model, optimizer, stage=stage, topology=topology):
        optimizer.state = defaultdict(dict)
        assert optimizer.state[parameter] == {}  # as plain torch's own, where it is looked for
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()
        with pytest.raises(StepError, match="a parameter of the model, of shape"):
            optimizer.state[parameter] = {}
        moments = {"momentum_buffer": torch.ones(parameter.shape)}
        optimizer.state = defaultdict(dict, {parameter: moments})
        raises_on_all(comm, StepError, "optimizer.state holds", optimizer.step)


class WithItsOwnList(torch.optim.SGD):
    """Moves the model's parameters that it was built with, beside those in its groups."""

    hpczero_elementwise = True

    def __init__(self, parameters: Any) -> None:
        self.own = list(parameters)
        super().__init__(self.own, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        super().step()
        for parameter in self.own:
            parameter.mul_(0.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_an_optimizer_that_changes_the_model_past_its_groups_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = MLP()
    optimizer = WithItsOwnList(model.parameters())
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        model(mlp_input(comm.rank)).sum().backward()
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
def test_options_of_any_plain_type_that_differ_are_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int, name: str
) -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        optimizer.param_groups[0].update(RATES[name](0.5))
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0].update(RATES[name](0.5 + 0.25 * (comm.rank == 1)))
        model(mlp_input(comm.rank)).sum().backward()
        if comm.size > 1:
            raises_on_all(comm, StepError, "where rank 0 has", optimizer.step)
