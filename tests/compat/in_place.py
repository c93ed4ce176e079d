# mypy: disable-error-code="override"
"""Blocks that change the tensors they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import WIDTH, Habits, Net, Residual

habits = Habits()


@habits.block("in-place-add")
class InPlaceAdd(Residual):
    """`h += f(h)` in a block that returns `h`."""

    def forward(self, h: Tensor) -> Tensor:
        h += self.outer(self.inner(torch.tanh(h)))  # nothing here keeps h for backward
        return h


class InPlaceAddWithoutReturn(Residual):
    def forward(self, h: Tensor) -> None:
        h += self.outer(self.inner(torch.tanh(h)))


@habits.model("in-place-add-no-return", block=InPlaceAddWithoutReturn)
class TrustsInPlace(Net):
    """`h += f(h)` in a block that returns nothing."""

    def through(self, x: Any) -> Any:
        h = torch.tanh(x) * 1.5
        for block in self.blocks:
            block(h)
        return h


class FillsColumn(Residual):
    def forward(self, x: Tensor, out: Tensor, i: int) -> None:
        out[i] = self.branch(x)


@habits.model("fills-out", block=FillsColumn)
class FilledByBlocks(Net):
    """`out[i] = f(x)` into a tensor argument."""

    def through(self, x: Any) -> Any:
        out = torch.zeros(len(self.blocks), *x.shape)
        for i, block in enumerate(self.blocks):
            block(x, out, i)
        return out.prod(0) + out.sum(0)


class InPlaceActivation(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh())


@habits.call("in-place-activation", block=InPlaceActivation)
def read_afterwards(block: Any, x: Tensor) -> Any:
    """`nn.ReLU(inplace=True)` on a block's input, which the caller reads afterwards."""
    h = x * 1.5
    return block(h) + h  # h went through the block's ReLU


class ScalesElement(Residual):
    def forward(self, tensors: list[Tensor]) -> Tensor:
        tensors[0].mul_(torch.sigmoid(self.branch(tensors[1])))
        return tensors[0]


@habits.model("in-place-in-list", block=ScalesElement)
class ScaledInList(Net):
    """In-place on a tensor inside a list argument."""

    def through(self, x: Any) -> Any:
        h = x * 2.0
        for block in self.blocks:
            block([h, x])
        return h
