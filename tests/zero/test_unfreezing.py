"""Parameters that are unfrozen and frozen in mid-run, and groups added to optimizers: plain torch's result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Offload
from tests.helpers.small_models import MLP, same, squares, update, values
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

Kind = Callable[[Any], torch.optim.Optimizer]

KINDS: dict[str, Kind] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Program:
    """A loop that unfreezes a layer before its third step, and freezes it for two steps later."""

    def __init__(self, kind: str = "adamw", gamma: float = 0.5) -> None:
        self.model = MLP()
        self.layer = self.model.layers[1].requires_grad_(False)
        self.optimizer = KINDS[kind]([p for p in self.model.parameters() if p.requires_grad])
        self.gamma = gamma
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, self.gamma)

    def before_step(self, number: int) -> None:
        """What the program does before a step."""
        if number == 2:
            self.layer.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 3e-3})
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, self.gamma)
        if number in (4, 6):
            self.layer.requires_grad_(number == 6)

    def after_backward(self) -> None:
        """The rest of a step."""
        update(self.optimizer)
        self.scheduler.step()

    def step(self, number: int, rank: int) -> None:
        """In shards."""
        self.before_step(number)
        squares(self.model, rank).backward()
        self.after_backward()


def step_both(world: World, program: Program, plain: Program, number: int) -> None:
    """Of a program in shards and one in plain torch."""
    program.before_step(number)
    plain.before_step(number)
    world.backward(program.model, plain.model, squares)
    program.after_backward()
    plain.after_backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_unfrozen_and_frozen_again_trains_as_in_plain_torch(world: World, stage, kind):
    plain, program = Program(kind), Program(kind)
    with world.zeroified(program.model, program.optimizer, stage=stage):
        for number in range(8):
            step_both(world, program, plain, number)
            world.check_weights(program.model, plain.model, within=2e-6)


class Twin(Program):
    """The same, with a master and a group for the layer from the start, and no gradient before it is unfrozen."""

    def __init__(self, kind: Kind, *, late: bool, precision: str) -> None:
        self.model = MLP()
        self.layer = self.model.layers[1]
        with torch.no_grad():  # a frozen base is held in the dtype of the parameters
            for parameter in self.layer.parameters() if precision == "bf16" else ():
                parameter.copy_(parameter.bfloat16())
        self.late = late
        self.layer.requires_grad_(not late)
        self.optimizer = kind([p for m in (0, 2) for p in self.model.layers[m].parameters()])
        if not late:
            self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 3e-3})

    def before_step(self, number: int) -> None:
        if number == 0 and not self.late:
            self.layer.requires_grad_(False)
        if number == 2:
            self.layer.requires_grad_(True)
            if self.late:
                group = {"params": list(self.layer.parameters()), "lr": 3e-3}
                self.optimizer.add_param_group(group)

    def after_backward(self) -> None:
        update(self.optimizer)


def bits(model: nn.Module) -> list[torch.Tensor]:
    with hpczero.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


TWINS: dict[str, Kind] = {
    **KINDS,
    "eight bits": lambda parameters: hpczero.optim.AdamW8bit(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "of whole parameters": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}
WAYS = [(way, precision) for way in ("window", "hierarchical") for precision in ("fp32", "bf16")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "transport", "precision"),
    [*((kind, "flat", "bf16") for kind in TWINS), *(("adamw", *way) for way in WAYS)],
)
def test_a_layer_unfrozen_later_has_the_bits_of_one_with_a_master(
    world: World, stage, kind, transport, precision
):
    found = []
    for late in (True, False):
        program = Twin(TWINS[kind], late=late, precision=precision)
        options = {"stage": stage, "precision": precision, "transport": transport}
        with world.zeroified(program.model, program.optimizer, **options) as sharding:
            for number in range(4):
                program.before_step(number)
                squares(program.model, world.rank).backward()
                clipped = hpczero.clip_grad_norm_(program.model, 0.05)
                program.after_backward()
            found.append([*values(sharding), *bits(program.model), torch.tensor(clipped)])
    world.check(same(*found))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_plan_are_those_of_a_layer_that_trained(world: World, stage, precision):
    held = []
    for late in (True, False):
        program = Twin(KINDS["adamw"], late=late, precision=precision)
        options = {"stage": stage, "precision": precision, "transport": "flat"}
        with world.zeroified(program.model, program.optimizer, **options) as sharding:
            for number in range(4):
                program.step(number, world.rank)
            now = {name: nbytes for name, nbytes in sharding.memory.current.items() if nbytes}
            held.append([now, sharding.plan.memory(), sharding.optimizer_nbytes()])
    world.check(held[0] == held[1], held)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_no_sync_has_left_count(world: World, stage):
    plain, program = Program("momentum"), Program("momentum")
    with world.zeroified(program.model, program.optimizer, stage=stage):
        for number in (0, 2, 3):
            plain.before_step(number)
            program.before_step(number)
            with hpczero.no_sync(program.model):
                world.backward(program.model, plain.model, squares)
            world.backward(program.model, plain.model, squares)
            norms = [
                torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.1)
                for each in (plain, program)
            ]
            world.check(torch.allclose(norms[0], norms[1].cpu()), norms)
            plain.after_backward()
            program.after_backward()
        world.check_weights(program.model, plain.model, within=2e-6)


def test_a_frozen_parameter_of_a_group_trains_once_it_is_unfrozen(world: World):
    plain, model = MLP(), MLP()
    optimizers = []
    for each in (plain, model):
        each.layers[1].requires_grad_(False)
        optimizers.append(KINDS["momentum"](each.named_parameters()))
    with world.zeroified(model, optimizers[1], stage=3):
        for number in range(4):
            for each in (plain, model):
                each.layers[1].requires_grad_(number > 1)
            world.backward(model, plain, squares)
            update(*optimizers)
        world.check_weights(model, plain, within=2e-6)
        for group in optimizers[1].param_groups:
            world.check(len(group["params"]) == len(group["param_names"]))


# --- while others rest on a memory tier

PLACES: dict[str, dict[str, Any]] = {
    "states": {"optimizer": "host"},
    "gradients too": {"optimizer": "host", "gradients": "host"},
    "the host steps": {"optimizer": "host", "gradients": "host", "step": "host"},
    "all of a part": {"optimizer": "host", "gradients": "host", "fraction": 0.5},
    "disk": {"optimizer": "disk", "gradients": "disk"},
    "parameters": {"optimizer": "host", "gradients": "host", "parameters": "host"},
}


def offload(place: str, folder: Path) -> Offload:
    return Offload(**PLACES[place], folder=folder, window=2**14, buffers=4)


@pytest.mark.parametrize(
    ("place", "stage"),
    [*((place, 3) for place in PLACES), *((place, 2) for place in PLACES if place != "parameters")],
)
def test_a_layer_unfrozen_beside_others_on_a_tier(world: World, place, stage, folder):
    plain, program = Program(), Program()
    where = offload(place, folder)
    with world.zeroified(program.model, program.optimizer, stage=stage, offload=where) as sharding:
        for number in range(7):
            step_both(world, program, plain, number)
        world.check_weights(program.model, plain.model, within=2e-6)
        away = [unit.spec.name for unit in sharding.units if unit.away is not None]
        world.check(away and not any("unfrozen" in name for name in away), away)


@pytest.mark.parametrize("place", ["gradients too", "the host steps"])
def test_a_run_goes_on_from_a_checkpoint_of_after_the_change(world: World, place, folder):
    found = []
    for resumed in (False, True):
        program = Program(gamma=1.0)
        model, optimizer, where = program.model, program.optimizer, offload(place, folder)
        with world.zeroified(model, optimizer, stage=3, offload=where) as sharding:
            if resumed:
                program.before_step(2)
                hpczero.checkpoint.load(folder / "saved", model, optimizer)
            for number in range(3 if resumed else 0, 7):
                program.step(number, world.rank)
                if number == 2:
                    hpczero.checkpoint.save(folder / "saved", model, optimizer, step=3)
            found.append(values(sharding))
    world.check(same(*found))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clipped_step_has_the_norm_of_a_run_without_a_tier(world: World, precision, folder):
    norms: list[list[float]] = [[], []]
    for found, where in zip(norms, (None, offload("gradients too", folder)), strict=True):
        program = Program()
        options = {"stage": 3, "precision": precision, "offload": where}
        with world.zeroified(program.model, program.optimizer, **options):
            for number in range(4):
                program.before_step(number)
                squares(program.model, world.rank).backward()
                found.append(float(hpczero.clip_grad_norm_(program.model, 0.05)))
                program.after_backward()
    world.check(norms[0] == pytest.approx(norms[1], rel=1e-6), norms)
