"""Linear regression: 100 weights, found back from noisy sums.

Owns: the data, drawn with a seed, and the known weights. Must not know: ranks. It is the smallest thing there is to
shard: on 10 ranks each keeps 10 weights.

    mpirun -n 10 python -m hpczero.train --model.factory examples.regression:build --train.global_batch 40
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes


@dataclass(frozen=True)
class Regression(Adapter):
    """y = w x + noise, with w unknown.

    Args:
        width: number of weights.
        rows: samples to train on; half as many are held out.
        noise: standard deviation of the noise; the best mean square error is its square.

    Raises:
        ValueError: a size is below 1.
    """

    width: int = 100
    rows: int = 2000
    noise: float = 0.1

    metric_name = "R2"

    def __post_init__(self) -> None:
        check_sizes("Regression", width=self.width, rows=self.rows)

    def build(self) -> nn.Module:
        """One linear layer without bias, (width) to (1)."""
        return nn.Linear(self.width, 1, bias=False)

    def samples(self) -> tuple[Any, Any]:
        """Rows of x, fp32 (width), and y, fp32 (1)."""
        generator = torch.Generator().manual_seed(100)
        weights = torch.randn(self.width, 1, generator=generator)
        x = torch.randn(self.rows * 3 // 2 + 1, self.width, generator=generator)
        noise = torch.randn(len(x), 1, generator=generator)
        y = x @ weights + self.noise * noise
        return (x[: self.rows], y[: self.rows]), (x[self.rows :], y[self.rows :])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean square error."""
        x, y = batch
        loss: Tensor = (model(x) - y).square().mean()
        return loss

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of the variance that is explained; of y it is known to be ``width`` in the mean over weights."""
        x, y = batch
        missed: Tensor = (model(x) - y).square().mean()
        return 1 - missed / self.width

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Nothing: the least squares are wanted."""
        del name, parameter
        return False


def build(width: int = 100, rows: int = 2000, noise: float = 0.1) -> Regression:
    """The adapter; for the arguments see ``Regression``."""
    return Regression(width, rows, noise)
