"""Backward passes that cannot be right are refused."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_input
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Checkpointed(MLP):
    """Each layer recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Recompute(torch.autograd.Function):
    """A reversible block: its backward calls the module again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return cast(Tensor, module(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(MLP):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = Recompute.apply(x, layer)
        return x


def whole(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


@STAGES
@pytest.mark.parametrize(
    ("make", "call", "said"),
    [
        (Checkpointed, nn.Module.__call__, "reentrant.*use_reentrant=False"),
        (MLP, whole, "reentrant.*use_reentrant=False"),
        (Reversible, nn.Module.__call__, "Functions do that call modules in their backward"),
    ],
    ids=["layers in reentrant checkpoints", "the model in one", "in the backward of a function"],
)
def test_modules_called_in_backward(world: World, stage, make, call, said):
    model = make()
    x = mlp_input(world.rank).requires_grad_()
    with world.zeroified(model, adamw(model), stage=stage):
        output = call(model, x).sum()
        with pytest.raises(StepError, match=said):
            output.backward()
        model.zero_grad()


# --- recovery


class Hidden(MLP):
    """Returns one thing, and puts another, made earlier or later, where nobody looks."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.layers[1] = HidingLayer(later=later)


class HidingLayer(nn.Module):
    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((15, 15), 0.1))
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        if self.later:
            output = torch.tanh(x @ self.weight)
        HIDDEN.append((x @ self.weight).square().sum())
        return output if self.later else torch.tanh(x @ self.weight)


HIDDEN: list[Tensor] = []


@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_way_into_a_unit_that_nobody_sees_is_an_error(
    world: World, transport, strict, monkeypatch
):
    monkeypatch.setenv("HPCZERO_STRICT", strict)
    model = Hidden(later=False)
    with world.zeroified(model, adamw(model), stage=3, transport=transport):
        HIDDEN.clear()
        model(mlp_input(world.rank))
        # On memory that lasts the error is ours; where it is gone torch is the first to notice.
        with pytest.raises((StepError, RuntimeError), match=r"hook sees|of size 0|not allocated"):
            HIDDEN[0].backward()
        HIDDEN.clear()
        model.zero_grad()


def hidden_loss(model: nn.Module, rank: int, *, alone: bool) -> Tensor:
    HIDDEN.clear()
    output = model(mlp_input(rank)).square().sum()
    return HIDDEN.pop() + (0.0 if alone else output)


def with_a_hook(model: Hidden) -> Hidden:
    """A penalty on a unit's weight, made in a forward hook of the user's."""

    def penalty(module: Any, args: Any, output: Tensor) -> None:
        HIDDEN.append(HIDDEN.pop() + module[0].weight.square().sum())

    model.layers[2].register_forward_hook(penalty)
    return model


@STAGES
@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
@pytest.mark.parametrize(("later", "alone"), [(True, True), (True, False), (False, False)], ids=str)
def test_what_is_put_where_nobody_looks_trains_as_plainly(
    world: World, stage, transport, later, alone
):
    plain = with_a_hook(Hidden(later=later))
    model = with_a_hook(Hidden(later=later))
    with world.zeroified(model, adamw(model), stage=stage, transport=transport):
        world.backward(model, plain, partial(hidden_loss, alone=alone))
        world.check_gradients(model, plain, within=1e-5)


@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_mutation_on_saved_tensors_is_refused_where_parameters_are_sharded(world: World, transport):
    with world.mlp(adamw, stage=3, transport=transport) as (model, optimizer):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            with torch.no_grad():
                model(mlp_input(world.rank))
            with pytest.raises(StepError, match="or train at stage 2"):
                model(mlp_input(world.rank))
        world.check_trains(model, optimizer)
