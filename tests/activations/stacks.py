"""What the tests of activations share: a stack of blocks with dropout, and what a few calls of it give.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.activations import Checkpointing
from tests.helpers.late import LateAccelerator
from tests.helpers.small_models import adamw, update
from tests.helpers.world import World
from tests.tier.twins import LateTier, PageTier, SlowTier

Call = Callable[..., Any]
BATCH, WIDTH = 88, 48  # an input of four pages and a bit; of two and a bit in half precision
INPUT_NBYTES = BATCH * WIDTH * 4
PAGES = 5


class Block(nn.Module):
    """A residual block with dropout, whose backward needs its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(any, WIDTH) in and out."""
        self.calls += 1
        y: Tensor = x + nn.functional.dropout(self.outer(torch.tanh(self.inner(x))), 0.2)
        return y


class Stack(nn.Module):
    """Blocks that ``call`` calls, behind a layer and before a sum."""

    def __init__(self, layers: int = 6, *, call: Call | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.call: Call = call or plain

    def forward(self, x: Tensor) -> Tensor:
        """(any, WIDTH) in, a number out."""
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def plain(block: Call, *args: Any) -> Any:
    """No checkpointing."""
    return block(*args)


def torchs(block: Call, *args: Any, **options: Any) -> Any:
    """torch's own."""
    return checkpoint(block, *args, use_reentrant=False, **options)


def batch(seed: int = 1, rows: int = BATCH) -> Tensor:
    """(rows, WIDTH) fp32."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(call: Call, steps: int = 3, layers: int = 6) -> list[Tensor]:
    """Losses and gradients of some steps, with SGD's own changes in between."""
    model = Stack(layers, call=call)
    found = []
    torch.manual_seed(7)
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    found.append(torch.rand(3))  # the random stream goes on as ever
    return found


LAYERS, STEPS = 4, 3  # of a sharded stack


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Of a batch and a dropout of its own for each seed."""
    torch.manual_seed(seed)
    loss: Tensor = model(batch(seed))
    return loss


def trained(
    world: World,
    call: Call,
    micro_batches: int = 1,
    *,
    alike: bool = False,
    failing: Callable[[nn.Module, Optimizer], object] | None = None,
    **options: Any,
) -> dict[str, Tensor] | None:
    """Weights of a sharded stack after some steps, on rank 0. Collective.

    Args:
        alike: all ranks have the same samples.
        failing: called before the second step, with the model and its optimizer.
    """
    model = Stack(LAYERS, call=call)
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, **options):
        if isinstance(call, Checkpointing):
            call.join(model)
        for step in range(STEPS):
            if step == 1 and failing is not None:
                failing(model, optimizer)
                optimizer.zero_grad()
            for micro in range(micro_batches):
                rank = 0 if alike else world.rank
                with hpczero.accumulate(model, micro, micro_batches):
                    loss_of(model, 1000 * step + 10 * micro + rank).backward()
            hpczero.clip_grad_norm_(model, 0.5)
            update(optimizer)
        return hpczero.full_state_dict(model)


def grads(model: nn.Module) -> list[Tensor]:
    """Of all parameters."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """In every bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def on_disk(folder: Path, **options: Any) -> Checkpointing:
    """Small blocks of staging, so that an input takes several."""
    return Checkpointing.create("disk", folder=folder, **{"window": 4096, "buffers": 4, **options})


def on_host(folder: Path, **options: Any) -> Checkpointing:
    """Of a device whose copies come late."""
    device = LateAccelerator()
    return Checkpointing.create("host", device=device, **{"window": 2**14, "buffers": 3, **options})


def over(tier: PageTier, folder: Path, **options: Any) -> Checkpointing:
    """A disk that is a twin of four blocks of a page."""
    return on_disk(folder, tier=tier, **options)


def slow(folder: Path, **options: Any) -> Checkpointing:
    """A tier that takes its time."""
    return over(SlowTier(blocks=4, block_nbytes=4096), folder, **options)


def late(folder: Path, **options: Any) -> Checkpointing:
    """A tier that moves at the last moment, and spoils what nobody may look at."""
    return over(LateTier(blocks=4, block_nbytes=4096), folder, **options)


PLACES = [on_disk, on_host, slow, late]
