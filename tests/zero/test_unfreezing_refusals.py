"""Ranks that freeze, unfreeze or add groups otherwise than others, and what cannot be unfrozen: named, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_steps
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@contextmanager
def frozen(
    world: World, make: Callable[[MLP], Any] = adamw, **options: Any
) -> Iterator[tuple[MLP, Any, Any]]:
    """A model, its layer that is frozen, and its optimizer; sharded inside."""
    model = MLP()
    layer: Any = model.layers[1].requires_grad_(False)
    optimizer = make(model)
    with world.zeroified(model, optimizer, **options):
        yield model, layer, optimizer


def sgd_of_the_rest(model: MLP) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def save(model: MLP, optimizer: Any) -> None:
    hpczero.checkpoint.save("never", model, optimizer, step=1)


@STAGES
@pytest.mark.parametrize("trainable", [True, False])
def test_freezing_or_unfreezing_on_one_rank(world: World, stage, trainable):
    model = MLP()
    model.layers[1].requires_grad_(not trainable)
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage):
        if world.rank == 1:
            model.layers[1].requires_grad_(trainable)
        mlp_backward(model, world.rank)
        what = "an unfrozen parameter 'layers.1.0.weight'"
        what = what if trainable else r"2 frozen parameter\(s\), first 'layers.1.0.weight'"
        world.refuses_step(model, optimizer, f"has .*{what}.*, where rank 0 has nothing")
        model.layers[1].requires_grad_(not trainable)
        if not trainable:
            world.check_trains(model, optimizer)


@STAGES
def test_a_group_added_on_one_rank(world: World, stage):
    with frozen(world, sgd_of_the_rest, stage=stage) as (model, layer, optimizer):
        layer.requires_grad_(True)
        if world.rank == 1:
            optimizer.add_param_group({"params": list(layer.parameters())})
        mlp_backward(model, world.rank)
        said = "has .*an added group 1 of the optimizer.*, where rank 0 has"
        world.raises(StepError, said, optimizer.step)


@STAGES
def test_unfrozen_and_in_no_group(world: World, stage):
    with frozen(world, sgd_of_the_rest, stage=stage) as (model, layer, optimizer):
        layer.requires_grad_(True)
        mlp_backward(model, world.rank)
        said = r"2 parameter\(s\) are unfrozen and in no optimizer group, first 'layers.1.0.weight'"
        world.raises(StepError, said, optimizer.step)
        optimizer.add_param_group({"params": list(layer.parameters())})
        optimizer.step()  # as in torch, with the gradients that are there


@STAGES
def test_a_parameter_added_to_a_second_group(world: World, stage):
    with frozen(world, stage=stage) as (model, layer, optimizer):
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters())})
        mlp_backward(model, world.rank)
        world.raises(StepError, "is in another group already", optimizer.step)


@pytest.mark.parametrize("transport", ["flat", "window", "hierarchical"])
def test_nothing_hangs_where_one_rank_unfreezes_alone(world: World, transport):
    with frozen(world, transport=transport) as (model, layer, optimizer):
        layer.requires_grad_(world.rank == 0)
        for _ in range(2):
            mlp_backward(model, world.rank)
            hpczero.clip_grad_norm_(model, 1.0)
            world.raises(StepError, "an unfrozen parameter|has nothing", optimizer.step)
            optimizer.zero_grad()
        world.raises(
            StepError, "an unfrozen parameter|has nothing", partial(save, model, optimizer)
        )
        layer.requires_grad_(True)
        mlp_steps(model, optimizer, world.rank)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "codes": ("rests as int8: its values are codes", {"quantize": "int8"}),
    "delayed": (
        "with a delayed update",
        {"offload": hpczero.Offload("host", "host", step="host", delayed=True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_unfrozen(world: World, case):
    said, options = CASES[case]
    with frozen(world, **options) as (model, layer, optimizer):
        layer[0].weight.requires_grad_(True)
        mlp_backward(model, world.rank)
        world.raises(StepError, said, optimizer.step)
        layer[0].weight.requires_grad_(False)
        optimizer.zero_grad()
        mlp_steps(model, optimizer, world.rank)


def test_a_part_of_a_unit(world: World):
    with frozen(world) as (model, layer, optimizer):
        layer[0].bias.requires_grad_(True)
        mlp_backward(model, world.rank)
        said = "'layers.1.0.bias' was unfrozen after zeroify, and 'layers.1.0.weight', of the same"
        world.raises(StepError, said, optimizer.step)
        layer.requires_grad_(True)
        optimizer.step()


@STAGES
def test_a_change_that_an_exception_has_left_half_done(world: World, stage, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # the layer is in a group of the optimizer: torch trains it once it is unfrozen
    with frozen(world, stage=stage) as (model, layer, optimizer):
        layer.requires_grad_(True)
        with monkeypatch.context() as patch:
            patch.setattr("hpczero.zero.attachment.point_at_shards", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mlp_backward(model, world.rank)
        optimizer.zero_grad()
        mlp_backward(model, world.rank)
        for use in (optimizer.step, partial(save, model, optimizer)):
            world.raises(StepError, "an exception cut off the change of what trains", use)


def test_averages_of_the_weights(world: World):
    with frozen(world) as (model, layer, optimizer):
        average = hpczero.optim.EMA(model, decay=0.9)
        layer.requires_grad_(True)
        mlp_backward(model, world.rank)
        world.raises(StepError, "while averages of the weights are kept", optimizer.step)
        average.close()
        optimizer.step()
