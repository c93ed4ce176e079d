"""What tests of shards that rest elsewhere share: where, a loop, the comparison with memory, a medium that fails.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload, Sharding
from hpczero.errors import TierError
from hpczero.tier import StagedTier
from tests.helpers.small_models import MLP, mlp_backward
from tests.helpers.world import World

WINDOW = 2**14
SIZES = (7, 131, 97, 3)  # shards of several windows

Maker = Callable[[Any], torch.optim.Optimizer]


def on(medium: Any, folder: Path | None = None, parts: int = 3, **options: Any) -> Offload:
    """The optimizer there; with more parts gradients and parameters too."""
    where: list[Any] = [medium if parts > place else "device" for place in range(3)]
    options = {"window": WINDOW, "buffers": 4, **options}
    return Offload(where[0], where[1], where[2], folder, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Steps of one or two micro-batches, reduced once or twice, clipped; one is added to the gradient before it."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        if step % 3 == 1:
            with hpczero.no_sync(model):
                mlp_backward(model, rank)
        elif step % 3 == 2:
            mlp_backward(model, rank)
        mlp_backward(model, rank)
        if step % 2:
            hpczero.clip_grad_norm_(model, 0.05)
        optimizer.step()
        if step != 3:
            optimizer.zero_grad()
        scheduler.step()


def trained(
    world: World, make: Maker, sizes: tuple[int, ...] = SIZES, **options: Any
) -> dict[str, Tensor] | None:
    """Weights after some steps, on rank 0. Collective."""
    model = MLP(sizes)
    optimizer = make(model.parameters())
    with world.zeroified(model, optimizer, **options):
        train(model, optimizer, world.rank, range(6))
        return hpczero.full_state_dict(model)


def check_bits(world: World, make: Maker, offload: Offload, **options: Any) -> None:
    """A training gives the bits of memory. Collective."""
    kept = trained(world, make, **options)
    world.check_state(trained(world, make, offload=offload, **options), kept)


@contextmanager
def broken(
    sharding: Sharding, call: str, *, here: bool, when: Callable[[int, int], bool] | None = None
) -> Iterator[None]:
    """``call`` of this rank's tier, ``_read`` or ``_write``, fails inside, where ``here``.

    Args:
        when: which calls fail, by their number and their offset; all if None.
    """
    assert sharding.away.store is not None
    tier = sharding.away.store.tier
    assert isinstance(tier, StagedTier)
    right, calls = getattr(tier, call), 0

    def fail(memory: Tensor, offset: int) -> None:
        nonlocal calls
        calls += 1
        if when is None or when(calls - 1, offset):
            raise TierError(f"offset {offset}: input/output error")
        right(memory, offset)

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(tier, call, fail)
        yield
