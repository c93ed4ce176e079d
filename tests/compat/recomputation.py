# mypy: disable-error-code="override"
"""Activations recomputed or kept elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.compat.construct import Construct, Net, Residual, net


def checkpointed(block: Any, x: Tensor, *, use_reentrant: bool = False) -> Any:
    return checkpoint(block, x, use_reentrant=use_reentrant)


class CheckpointsInside(Residual):
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


class CheckpointsWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointsSequence(Net):
    def through(self, x: Any) -> Any:
        return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)


def with_dropout(block: Any, x: Tensor) -> Any:
    return checkpoint(lambda h: F.dropout(block(h), 0.3), x, use_reentrant=False)


class CheckpointsDict(Net):
    """What goes through the checkpoint is a dict that the block changes."""

    def through(self, x: Any) -> Any:
        return super().through({"h": x})["h"]

    def call(self, block: Any, x: Any) -> Any:
        return checkpoint(lambda state: {"h": block(state["h"])}, x, use_reentrant=False)


class Offloads(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class PacksSaved(Net):
    """Saved tensors kept in half precision are common; here they are kept as they are, elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().forward(x)


CONSTRUCTS = [
    Construct(
        "checkpoint-blocks", "`checkpoint(block, x)` around each block", net(call=checkpointed)
    ),
    Construct("checkpoint-inside", "a checkpoint inside each block", net(CheckpointsInside)),
    Construct(
        "checkpoint-nested", "a checkpoint in a block in a checkpoint in a block", net(Outer)
    ),
    Construct(
        "checkpoint-nested-outside",
        "the same in a checkpoint around each block",
        net(Outer, call=checkpointed),
    ),
    Construct(
        "checkpoint-whole",
        "a checkpoint around the whole forward, blocks included",
        net(kind=CheckpointsWhole),
    ),
    Construct(
        "checkpoint-sequential",
        "`checkpoint_sequential` over the blocks",
        net(kind=CheckpointsSequence),
    ),
    Construct(
        "checkpoint-dropout",
        "dropout in a checkpoint: the same mask again",
        net(call=with_dropout),
    ),
    Construct(
        "checkpoint-dict",
        "a checkpoint around a block that returns a dict",
        net(kind=CheckpointsDict),
    ),
    Construct(
        "checkpoint-reentrant",
        "`checkpoint(..., use_reentrant=True)`",
        net(call=partial(checkpointed, use_reentrant=True)),
        refused="use_reentrant=False",
        remark="`use_reentrant=False`",
    ),
    Construct(
        "save-on-cpu", "`torch.autograd.graph.save_on_cpu()` around the forward", net(kind=Offloads)
    ),
    Construct("saved-tensors-hooks", "`saved_tensors_hooks` that clone", net(kind=PacksSaved)),
]
