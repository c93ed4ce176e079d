"""Parameters that are unfrozen and frozen in mid-run, and groups added to optimizers: plain torch's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from tests.helpers.small_models import MLP, check_weights, mlp_input, zeroified

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
