# mypy: disable-error-code="override"
"""Activations recomputed or kept elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.compat.construct import Habits, Net, Residual

habits = Habits()


@habits.call("checkpoint-blocks")
def checkpointed(block: Any, x: Tensor, *, use_reentrant: bool = False) -> Any:
    """`checkpoint(block, x)` around each block."""
    return checkpoint(block, x, use_reentrant=use_reentrant)


@habits.block("checkpoint-inside")
class CheckpointsInside(Residual):
    """A checkpoint inside each block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.branch, x, use_reentrant=False)


class Outer(nn.Module):
    """A unit with a checkpoint in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList([CheckpointsInside(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.inside:
            x = checkpoint(each, x, use_reentrant=False)
        return x


@habits.model("checkpoint-whole")
class CheckpointsWhole(Net):
    """A checkpoint around the whole forward, blocks included."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@habits.model("checkpoint-sequential")
class CheckpointsSequence(Net):
    """`checkpoint_sequential` over the blocks."""

    def through(self, x: Any) -> Any:
        return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)


@habits.call("checkpoint-dropout")
def with_dropout(block: Any, x: Tensor) -> Any:
    """Dropout in a checkpoint: the same mask again."""
    return checkpoint(lambda h: F.dropout(block(h), 0.3), x, use_reentrant=False)


@habits.model("checkpoint-dict")
class CheckpointsDict(Net):
    """A checkpoint around a block that returns a dict.

    What goes through the checkpoint is a dict that the block changes.
    """

    def through(self, x: Any) -> Any:
        return super().through({"h": x})["h"]

    def call(self, block: Any, x: Any) -> Any:
        return checkpoint(lambda state: {"h": block(state["h"])}, x, use_reentrant=False)


@habits.model("save-on-cpu")
class Offloads(Net):
    """`torch.autograd.graph.save_on_cpu()` around the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


@habits.model("saved-tensors-hooks")
class PacksSaved(Net):
    """`saved_tensors_hooks` that clone.

    Saved tensors kept in half precision are common; here they are kept as they are, elsewhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().forward(x)


habits.add("checkpoint-nested", "a checkpoint in a block in a checkpoint in a block", block=Outer)
habits.add(
    "checkpoint-nested-outside",
    "the same in a checkpoint around each block",
    block=Outer,
    call=checkpointed,
)
habits.add(
    "checkpoint-reentrant",
    "`checkpoint(..., use_reentrant=True)`",
    call=partial(checkpointed, use_reentrant=True),
    refused="use_reentrant=False",
    remark="`use_reentrant=False`",
)
