"""Parameters that are unfrozen and frozen in mid-run, and groups added to optimizers: plain torch's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    check_weights,
    mlp_input,
    same,
    values,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

Kind = Callable[[Any], torch.optim.Optimizer]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


KINDS = [_adamw, _fused, _foreach, _momentum]


class Program:
    """A loop that unfreezes a layer after some steps, and freezes it again."""

    def __init__(self, kind: Kind) -> None:
        self.model = MLP()
        self.model.layers[1].requires_grad_(False)
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def before_step(self, number: int) -> None:
        """What the program does before a step."""
        layer = self.model.layers[1]
        if number == 2:
            for parameter in layer.parameters():
                parameter.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-3})
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        if number in (4, 6):
            layer.requires_grad_(number == 6)

    def after_step(self) -> None:
        """Also the schedule."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def _train(program: Program, plain: Program, comm: MPI.Intracomm, steps: range) -> None:
    for number in steps:
        plain.before_step(number)
        losses = [plain.model(mlp_input(rank)).square().mean() for rank in range(comm.size)]
        torch.stack(losses).mean().backward()
        plain.after_step()
        program.before_step(number)
        program.model(mlp_input(comm.rank)).square().mean().backward()
        program.after_step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__.strip("_"))
def test_a_layer_unfrozen_and_frozen_again_trains_as_in_plain_torch(
    comm: MPI.Intracomm, topology: Topology, stage: int, kind: Kind
) -> None:
    plain, program = Program(kind), Program(kind)
    with zeroified(program.model, program.optimizer, stage=stage, topology=topology):
        for start, stop in ((0, 2), (2, 3), (3, 5), (5, 8)):
            _train(program, plain, comm, range(start, stop))
            check_weights(comm, program.model, plain.model, within=2e-6)


class _Twin(Program):
    """The same, with a master and a group for the layer from the start, and no gradient before it is unfrozen."""

    def __init__(self, kind: Kind, *, late: bool, precision: str) -> None:
        self.model = MLP()
        layer = self.model.layers[1]
        with torch.no_grad():  # a frozen base is held in the dtype of the parameters
            for parameter in layer.parameters() if precision == "bf16" else ():
                parameter.copy_(parameter.bfloat16())
        self.late = late
        layer.requires_grad_(not late)
        self.optimizer = kind([p for m in (0, 2) for p in self.model.layers[m].parameters()])
        if not late:
            self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-3})

    def before_step(self, number: int) -> None:
        layer = self.model.layers[1]
        if number == 0 and not self.late:
            layer.requires_grad_(False)
        if number == 2:
            layer.requires_grad_(True)
            if self.late:
                self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-3})

    def after_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _eight_bit(parameters: Any) -> torch.optim.Optimizer:
    return hpczero.optim.AdamW8bit(parameters, lr=1e-2)


def _adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)  # steps on whole parameters


def _bits(model: nn.Module) -> list[torch.Tensor]:
    with hpczero.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


TWINS = [(kind, "flat", "bf16") for kind in (*KINDS, _eight_bit, _adagrad, _adafactor)]
TWINS += [
    (_adamw, way, precision) for way in ("window", "hierarchical") for precision in ("fp32", "bf16")
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "transport", "precision"),
    TWINS,
    ids=lambda each: each if isinstance(each, str) else each.__name__.strip("_"),
)
def test_a_layer_unfrozen_later_is_in_every_bit_one_that_had_a_master_from_the_start(
    comm: MPI.Intracomm, topology: Topology, stage: int, kind: Kind, transport: str, precision: str
) -> None:
    found = []
    for late in (True, False):
        program = _Twin(kind, late=late, precision=precision)
        options: dict[str, Any] = {"stage": stage, "precision": precision, "transport": transport}
        with zeroified(program.model, program.optimizer, topology=topology, **options) as sharding:
            for number in range(4):
                program.before_step(number)
                program.model(mlp_input(comm.rank)).square().mean().backward()
                clipped = hpczero.clip_grad_norm_(program.model, 0.05)
                program.after_step()
            found.append([*values(sharding), *_bits(program.model), torch.tensor(clipped)])
    parallel_assert(comm, same(*found))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_plan_are_those_of_a_model_that_trained_the_layer_from_the_start(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: str
) -> None:
    held = []
    for late in (True, False):
        program = _Twin(_adamw, late=late, precision=precision)
        options: dict[str, Any] = {"stage": stage, "precision": precision, "transport": "flat"}
        with zeroified(program.model, program.optimizer, topology=topology, **options) as sharding:
            for number in range(4):
                program.before_step(number)
                program.model(mlp_input(comm.rank)).square().mean().backward()
                program.after_step()
            now = {name: nbytes for name, nbytes in sharding.memory.current.items() if nbytes}
            held.append([now, sharding.plan.memory(), sharding.optimizer_nbytes()])
    parallel_assert(comm, held[0] == held[1], f"{held}")


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_no_sync_has_left_count(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    plain, program = Program(_momentum), Program(_momentum)
    with zeroified(program.model, program.optimizer, stage=stage, topology=topology):
        for number in (0, 2, 3):
            plain.before_step(number)
            for _ in range(2):
                losses = [plain.model(mlp_input(rank)).square().mean() for rank in range(comm.size)]
                torch.stack(losses).mean().backward()
            program.before_step(number)
            with hpczero.no_sync(program.model):
                program.model(mlp_input(comm.rank)).square().mean().backward()
            program.model(mlp_input(comm.rank)).square().mean().backward()
            norms = [
                torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.1)
                for each in (plain, program)
            ]
            parallel_assert(comm, torch.allclose(norms[0], norms[1].cpu()), f"{norms}")
            plain.after_step()
            program.after_step()
        check_weights(comm, program.model, plain.model, within=2e-6)


def test_a_frozen_parameter_of_a_group_trains_once_it_is_unfrozen(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    plain, model = MLP(), MLP()
    optimizers = []
    for each in (plain, model):
        each.layers[1].requires_grad_(False)
        optimizers.append(_momentum(each.named_parameters()))
    with zeroified(model, optimizers[1], stage=3, topology=topology):
        for number in range(4):
            for each in (plain, model):
                each.layers[1].requires_grad_(number > 1)
            losses = [plain(mlp_input(rank)).square().mean() for rank in range(comm.size)]
            torch.stack(losses).mean().backward()
            model(mlp_input(comm.rank)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        check_weights(comm, model, plain, within=2e-6)
        for group in optimizers[1].param_groups:
            parallel_assert(comm, len(group["params"]) == len(group["param_names"]))
