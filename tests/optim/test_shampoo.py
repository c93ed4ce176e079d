"""Shampoo in plain torch: its update written down in fp64, and what it is for."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpczero.optim import Shampoo
from tests.optim.rules import stack_and_its_matrices


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, values[-1] * 1e-6) ** exponent) @ vectors.T


def test_the_update_is_the_one_that_was_published():
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 7, generator=generator))
    expected = parameter.detach().double().numpy()
    optimizer = Shampoo([parameter], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1, every=1)
    left, right, squares, momentum = np.zeros((5, 5)), np.zeros((7, 7)), np.zeros(()), np.zeros(())
    for step in range(1, 5):
        parameter.grad = torch.randn(5, 7, generator=generator)
        optimizer.step()
        g = parameter.grad.double().numpy()
        left, right = 0.9 * left + 0.1 * g @ g.T, 0.9 * right + 0.1 * g.T @ g
        squares = 0.9 * squares + 0.1 * g * g
        adams = g / (np.sqrt(squares / (1 - 0.9**step)) + 1e-8)
        update = power(left, -0.25) @ g @ power(right, -0.25)
        update *= np.linalg.norm(adams) / np.linalg.norm(update)
        momentum = 0.8 * momentum + 0.2 * update
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * momentum / (1 - 0.8**step)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-4)


def test_a_stack_is_its_matrices():
    assert torch.allclose(*stack_and_its_matrices(partial(Shampoo, every=1)), atol=1e-6)


def loss_of(weights: Tensor, inputs: Tensor) -> Tensor:
    return (inputs @ (weights - 1)).square().mean()


def test_badly_scaled_inputs_matter_less_than_to_adam():
    scales = torch.logspace(0, -2, 12)
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(3)))[0]
    inputs = torch.randn(64, 12, generator=torch.Generator().manual_seed(2)) * scales @ rotation
    ends = []
    for kind in (Shampoo, torch.optim.AdamW):
        weights = nn.Parameter(torch.zeros(12, 9))
        optimizer = kind([weights], lr=0.03, weight_decay=0.0)
        for _ in range(150):
            optimizer.zero_grad()
            loss_of(weights, inputs).backward()
            optimizer.step()
        ends.append(loss_of(weights, inputs).item())
    assert ends[0] < ends[1]


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1), ("least", -1), ("every", 0), ("betas", (1.0, 0.9))]
)
def test_bad_options_are_refused(name, value):
    options = {name: value}
    with pytest.raises(ValueError, match=name):
        Shampoo([nn.Parameter(torch.ones(2, 2))], **options)
