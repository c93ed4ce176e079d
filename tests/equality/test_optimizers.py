"""fp32 training with stock optimizers, schedulers and clipping equals one process at every stage."""

from __future__ import annotations

import pytest
import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.equality import models
from tests.equality.cases import gpt_case, seeded_case

pytestmark = pytest.mark.mpi

OPTIMIZERS = {
    "SGD": lambda p: SGD(p, lr=0.05),
    "SGD with momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.02, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: Adam(p, lr=3e-3, weight_decay=0.01, amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1),
    "Adam fused": lambda p: Adam(p, lr=3e-3, fused=True),
    "AdamW fused": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1, fused=True),
}
RARE_OPTIMIZERS = {
    "AdamW foreach": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1, foreach=True),
    "Adadelta": lambda p: Adadelta(p, lr=0.5),
    "Adamax": lambda p: Adamax(p, lr=3e-3),
    "ASGD": lambda p: ASGD(p, lr=0.02, t0=3),
    "NAdam": lambda p: NAdam(p, lr=3e-3),
    "RAdam": lambda p: RAdam(p, lr=0.02),
    "Rprop": lambda p: Rprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(equals_one_process, name):
    def optimizer(model):
        return OPTIMIZERS[name](model.parameters())

    equals_one_process(seeded_case(models.Stack, optimizer=optimizer))


@pytest.mark.ranks(
    3
)  # the update is elementwise: one number of ranks shows that shards change nothing
@pytest.mark.parametrize("name", RARE_OPTIMIZERS)
def test_rare_optimizer(equals_one_process, name):
    def optimizer(model):
        return RARE_OPTIMIZERS[name](model.parameters())

    equals_one_process(seeded_case(models.Stack, optimizer=optimizer))


def two_groups(model):
    """Matrices decay and learn fast; vectors of the blocks do neither."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "lr": 5e-3, "weight_decay": 0.3},
        {"params": vectors, "lr": 1e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, eps=1e-3)  # see cases.smooth_adamw


def test_two_groups_under_a_scheduler(equals_one_process):
    def scheduler(optimizer):
        return LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: min(1, step / 5)])

    equals_one_process(gpt_case(models.gpt, optimizer=two_groups, scheduler=scheduler))


def test_two_groups_under_a_scheduler_that_changes_momentum_too(equals_one_process):
    def scheduler(optimizer):
        return OneCycleLR(optimizer, max_lr=[1e-2, 2e-3], total_steps=12)

    equals_one_process(seeded_case(models.Stack, optimizer=two_groups, scheduler=scheduler))


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 3.8), (float("inf"), 0.9)])
def test_clipped_gradients(equals_one_process, norm_type, max_norm):
    # Plain SGD: unlike Adam it does not undo a factor on the gradient.
    def optimizer(model):
        return SGD(model.parameters(), lr=0.1)

    equals_one_process(
        gpt_case(models.gpt, optimizer=optimizer, max_norm=max_norm, norm_type=norm_type)
    )
