"""A zeroified model is not moved, cast, copied or pickled; what changes nothing passes, at every stage."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import PlanError, StepError
from tests.helpers.small_models import MLP, adamw, mlp_input, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])

NOTHING: dict[str, Callable[[nn.Module], object]] = {
    "to(device)": lambda model: model.to("cpu"),
    "to(device, dtype)": lambda model: model.to("cpu", torch.float32, non_blocking=True),
    "to(other tensor)": lambda model: model.to(torch.zeros(1)),
    "to(memory_format)": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
    "unit": lambda model: model.get_submodule("layers.1").float(),
    "inside a unit": lambda model: model.get_submodule("layers.1.0").to("cpu"),
    "wrapper": lambda model: nn.ModuleDict({"wrapped": model}).to("cpu", torch.float32),
}
CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda model: model.half(), "would become torch.float16 on cpu"),
    "double": (lambda model: model.double(), "would become torch.float64 on cpu"),
    "to(dtype)": (lambda model: model.to(torch.bfloat16), "would become torch.bfloat16 on cpu"),
    "meta": (lambda model: model.to("meta"), "would become torch.float32 on meta"),
    "wrapper": (lambda model: nn.Sequential(model).half(), "would become torch.float16 on cpu"),
    "unit": (lambda model: model.get_submodule("layers.0").half(), "would become torch.float16"),
}


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_changes_nothing_passes(world: World, stage, transport, precision):
    options = {"stage": stage, "transport": transport, "precision": precision}
    with world.mlp(adamw, **options) as (model, optimizer):
        parameters = list(model.parameters())
        if precision == "fp32":
            for change in NOTHING.values():
                change(model)
        model.to("cpu").to(parameters[0].dtype)
        world.check(all(a is b for a, b in zip(model.parameters(), parameters, strict=True)))
        model(mlp_input(world.rank)).sum().backward()
        update(optimizer)
        if precision == "fp32":
            world.check_trains(model, optimizer)


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("name", CHANGES)
def test_what_moves_or_casts_is_refused_at_once_by_name(world: World, stage, transport, name):
    model = MLP()
    change, said = CHANGES[name]
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        before = r"parameter 'layers\.0\.0\.weight' is torch.float32 on cpu"
        with pytest.raises(StepError, match=f"{before} and {said}.*before zeroify"):
            change(model)
        world.check_trains(model, optimizer)  # and no harm was done


def test_four_dimensional_weight_is_not_laid_out_anew(world: World):
    for stage in (0, 3):
        model: Any = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
        with world.zeroified(model, adamw(model), stage=stage):
            model.to(memory_format=torch.contiguous_format)
            with pytest.raises(StepError, match=r"'0\.weight' .* would get other memory"):
                model.to(memory_format=torch.channels_last)


def test_buffer_that_would_be_cast_is_named(world: World):
    model = MLP()
    model.register_buffer("table", torch.zeros(2, dtype=torch.float64))
    said = r"buffer 'table' is torch\.float64 on cpu and would"
    with world.zeroified(model, adamw(model)), pytest.raises(StepError, match=said):
        model.float()


# --- copies

COPIES: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "deepcopy of a unit": lambda model: copy.deepcopy(model.get_submodule("layers.1")),
    "torch.save of a unit": lambda model: torch.save(model.get_submodule("layers.1"), io.BytesIO()),
    "wrapper": lambda model: copy.deepcopy(nn.Sequential(model)),
}


@STAGES
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in gathered"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_are_refused_with_the_remedy(world: World, stage, inside, duplicate):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        said = r"cannot be copied or pickled.*full_state_dict"
        around = hpczero.gathered(model) if inside else nullcontext()
        with around, pytest.raises(PlanError, match=said):
            duplicate(model)
        world.check_trains(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
def test_module_inside_a_unit_can_be_copied_where_it_is_whole(world: World, stage):
    model, x = MLP(), mlp_input(0)
    expected = MLP().get_submodule("layers.0.0")(x)
    with world.zeroified(model, adamw(model), stage=stage):
        linear = model.get_submodule("layers.0.0")
        if stage == 3:
            for duplicate in (copy.deepcopy, pickle.dumps):
                with pytest.raises(StepError, match=r"or pickled; do that inside .*gathered"):
                    duplicate(linear)
        with hpczero.gathered(model):
            copied = copy.deepcopy(linear)
        world.check(torch.equal(copied(x), expected))


@STAGES
def test_copy_of_a_module_with_a_users_forward_hook_is_a_plain_module(world: World, stage):
    model, x = MLP(), mlp_input(world.rank)
    optimizer = adamw(model)
    seen: list[int] = []
    linear = model.get_submodule("layers.0.0")
    linear.register_forward_hook(partial(_count, seen))
    with world.zeroified(model, optimizer, stage=stage):
        model(x).square().sum().backward()  # from here on a hook of hpczero's watches it too
        optimizer.step()
        with hpczero.gathered(model):
            copies = [copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))]
            expected = linear(x)
        for copied in copies:
            world.check(torch.equal(copied(x), expected))
            copied(x).sum().backward()
        world.check_trains(model, optimizer)
    world.check(seen != [])


def _count(seen: list[int], *arguments: Any) -> None:
    seen.append(1)


def test_released_model_can_be_copied_and_cast(world: World):
    with world.mlp(adamw, stage=2) as (model, _):
        pass
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model).double()))
    world.check(copied.get_parameter("layers.0.0.weight").dtype is torch.float64)
