"""hpczero.optim.Muon in plain torch: torch's own update, over stacks too, and AdamW's for all else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hpczero.optim import Muon
from hpczero.optim.muon import orthogonalized
from tests.optim.rules import (
    Zoo,
    stack_and_its_matrices,
    stock_muon,
    torchs_iteration_in_fp32,
)

SHAPES = [(19, 7), (7, 19), (7, 7), (1, 5), (5, 1)]


def matrices(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(9)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_every_bit_is_torchs(ns_dtype, adjust_lr_fn, nesterov):
    ours, theirs = matrices(), matrices()
    options: dict[str, Any] = {"lr": 0.03, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    steps(Muon(ours, ns_dtype=ns_dtype, **options), ours)
    muon = stock_muon(theirs, **options)
    if ns_dtype == "float32":
        with torchs_iteration_in_fp32():
            steps(muon, theirs)
    else:
        steps(muon, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_stack_is_its_matrices():
    assert torch.equal(*stack_and_its_matrices(Muon))


def test_singular_values_come_near_one():
    matrix = torch.randn(20, 12, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_second_rule_is_adamw():
    ours, theirs = [nn.Parameter(torch.ones(5))], [nn.Parameter(torch.ones(5))]
    steps(Muon(ours, lr=0.01, rule="adamw", betas=(0.8, 0.9)), ours)
    steps(torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1), theirs)
    assert torch.equal(ours[0], theirs[0])


def test_tables_vectors_and_what_is_said_go_to_adamw():
    model = nn.ModuleDict(
        {"zoo": Zoo(), "convolution": nn.Conv2d(2, 3, 3), "lm_head": nn.Linear(4, 6)}
    )
    optimizer = Muon.of(model, adamw=lambda name, _: "lm_head" in name)
    names = {id(p): name for name, p in model.named_parameters()}
    first, second = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["rule"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert "zoo.experts" in first
    assert "zoo.square.weight" in first
    assert {"zoo.table.weight", "convolution.weight", "lm_head.weight"} <= {*second}
    assert not any("bias" in name for name in first)
    assert not any("frozen" in name for name in (*first, *second))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "group 0 of Muon: got a parameter of shape (5,)"),
        ({"rule": "sgd"}, "rule of group 0: got 'sgd'"),
        ({"rule": "adamw", "ns_dtype": "float16"}, "ns_dtype of group 0: got 'float16'"),
        ({"rule": "adamw", "lr": -1.0}, "lr of group 0: got -1.0"),
        ({"rule": "adamw", "betas": (0.9, 1.0)}, "betas of group 0: got (0.9, 1.0)"),
        ({"rule": "adamw", "ns_steps": 100}, "ns_steps of group 0: got 100"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Muon([nn.Parameter(torch.ones(5))], **options)
