"""Options and groups of the optimizer: each parameter has after a load what it had, or load and save refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.helpers.small_models import MLP, adamw, mlp_steps
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

GROUPS: dict[str, Callable[[MLP], list[list[nn.Parameter]]]] = {
    "weights, biases": lambda m: [
        [p for p in m.parameters() if p.dim() > 1],
        [p for p in m.parameters() if p.dim() <= 1],
    ],
    "biases, weights": lambda m: GROUPS["weights, biases"](m)[::-1],
    "first, rest": lambda m: [list(m.layers[0].parameters()), list(m.layers[1:].parameters())],
}


def grouped(model: MLP, way: str = "weights, biases") -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": group} for group in GROUPS[way](model)], lr=0.1)


@pytest.mark.parametrize(
    ("way", "pattern"),
    [
        ("biases, weights", r"layers.0.0.weight is in group 0 .* checkpoint and in group 1 here"),
        ("first, rest", r"layers.0.0.bias is in group 1 .* checkpoint and in group 0 here"),
    ],
)
def test_groups_of_other_members_are_refused(world: World, way: str, pattern: str) -> None:
    with world.mlp(grouped) as (model, _):
        hpczero.checkpoint.save(world.folder, model, step=1)
    with world.mlp(partial(grouped, way=way)) as (model, _):
        world.raises(CheckpointMismatch, pattern, hpczero.checkpoint.load, world.folder, model)


class Tied(nn.Module):
    """One weight under two names, the first of which depends on the order; and a layer that may be frozen."""

    def __init__(self, first: str, second: str, *, frozen: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(5, 3))
        for name in (first, second):
            self.add_module(name, nn.Linear(3, 5, bias=False))
            self.get_submodule(name).weight = weight
        self.last = nn.Linear(3, 5)
        self.last.requires_grad_(not frozen)


def test_groups_are_those_of_tied_parameters_by_either_name_and_not_of_frozen_ones(
    world: World,
) -> None:
    for names, frozen in ((("a", "b"), False), (("b", "a"), True)):
        model = Tied(*names, frozen=frozen)
        last = [p for p in model.last.parameters() if p.requires_grad]
        groups = [{"params": last}, {"params": [model.get_parameter(f"{names[0]}.weight")]}]
        with world.zeroified(model, torch.optim.AdamW(groups, lr=0.1)):
            if frozen:
                world.check(hpczero.checkpoint.load(world.folder, model).step == 1)
            else:
                hpczero.checkpoint.save(world.folder, model, step=1)


# The option, what it is at the save, and what stands there at the load.
NUMBERS: dict[str, tuple[str, Any, Any]] = {
    "a float of NumPy": ("lr", np.float32(0.3), 0.1),
    "the same there": ("lr", np.float32(0.3), np.float32(0.1)),
    "an array of no dimension": ("lr", np.array(0.3), np.array(0.1)),
    "a truth of NumPy": ("flag", np.bool_(True), False),
    "a number of NumPy": ("count", np.int64(7), 0),
    "a pair of NumPy": ("betas", (np.float32(0.5), 0.25), (np.float32(0.9), 0.999)),
    "tensors": ("betas", (torch.tensor(0.5), torch.tensor(0.25)), (0.9, 0.999)),
    "tensors there": ("betas", (torch.tensor(0.5), 0.25), (torch.tensor(0.9), torch.tensor(0.999))),
    "nested": ("own", ((1, (np.float32(0.5),)), "a"), ((2, (0.25,)), "b")),
    "a dictionary": ("own", {"a": 1, 2: (np.float32(0.5),)}, {"a": 3, 2: (0.25,)}),
    "without end": ("own", (math.inf, -math.inf), (1.0, 1.0)),
}


@pytest.mark.parametrize("case", NUMBERS)
@pytest.mark.parametrize("background", [False, True])
def test_numbers_of_numpy_and_torch_come_back_as_what_the_optimizer_has(
    world: World, case: str, background: bool
) -> None:
    name, given, there = NUMBERS[case]
    with world.mlp(adamw) as (model, optimizer):
        optimizer.param_groups[0] |= {name: given, "nan": math.nan}
        with Checkpoints(world.folder, model, background=background) as checkpoints:
            checkpoints.save(1)
        optimizer.param_groups[0] |= {name: there, "nan": 1.0}
        hpczero.checkpoint.load(world.folder, model)
        found = optimizer.param_groups[0][name]
    world.check(found == given and math.isnan(optimizer.param_groups[0]["nan"]), f"{found}")
    world.check(type(found) is type(there), repr(found))
    if isinstance(there, tuple):
        world.check([*map(type, found)] == [*map(type, there)], repr(found))


DATA: dict[str, tuple[Any, str]] = {
    "complex": (1 + 2j, "complex"),
    "in a pair": ((0.5, 1 + 2j), "complex"),
    "a tensor of elements": (torch.zeros(3), r"Tensor of shape \(3,\)"),
    "an array of elements": (np.zeros((2, 3)), r"ndarray of shape \(2, 3\)"),
    "a set": ({1, 2}, "set"),
    "a key that is a tuple": ({(1, 2): 3}, r"key \(1, 2\)"),
    "many digits": (10**5000, "very many digits"),
    "more than 64 bits": (2**63, "9223372036854775808"),
}


@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("background", [False, True])
def test_option_that_cannot_be_kept_is_refused_with_its_group(
    world: World, case: str, background: bool
) -> None:
    value, got = DATA[case]
    with world.mlp(grouped) as (model, optimizer):
        optimizer.param_groups[1]["own"] = value
        checkpoints = Checkpoints(world.folder, model, background=background)
        pattern = rf"option 'own' of group 1 of the optimizer.*{got}"
        world.raises(CheckpointError, pattern, checkpoints.save, 1)
        world.check(not list(world.folder.glob("step-*")))
        checkpoints.close()


def test_functions_among_the_options_are_told_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.mlp(grouped) as (model, optimizer):
        optimizer.param_groups[1]["own"] = keep = lambda x: x
        for step in (1, 2):
            hpczero.checkpoint.save(world.folder, model, step=step)
        hpczero.checkpoint.load(world.folder, model)
        world.check(optimizer.param_groups[1]["own"] is keep)
    world.check_told(caplog, "option 'own'")
    world.check(("function" in caplog.text) is (world.rank == 0), caplog.text)


def test_checkpoint_without_optimizer_state_is_told_of_by_whoever_has_an_optimizer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.mlp(None) as (model, _):
        path = hpczero.checkpoint.save(world.folder, model, step=1)
        hpczero.checkpoint.load(world.folder, model)
    world.check(not caplog.records, caplog.text)
    with world.mlp(adamw) as (model, _):
        for _ in range(2):
            hpczero.checkpoint.load(world.folder, model)
    world.check_told(caplog, f"{path}: holds no optimizer state")


def test_weights_alone_do_not_take_the_place_of_a_checkpoint_with_optimizer_state(
    world: World,
) -> None:
    with world.mlp(adamw) as (model, optimizer):
        mlp_steps(model, optimizer, world.rank)
        path = hpczero.checkpoint.save(world.folder, model, step=5)
    before = (path / "manifest.json").read_text()
    with world.mlp(None) as (model, _):
        hpczero.checkpoint.load(world.folder, model)
        for background in (False, True):
            with Checkpoints(world.folder, model, background=background) as checkpoints:
                pattern = rf"{path}: holds the state of AdamW.* another directory or another step"
                world.raises(ConfigError, pattern, checkpoints.save, 5)
        world.check((path / "manifest.json").read_text() == before)
        for _ in range(2):
            hpczero.checkpoint.save(world.folder, model, step=6)
