"""Backward on a thread of its own, as autograd runs it for a device: the same bits as on the thread of forward.

The device is the late twin, on which torch itself would stay on the thread that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import hpczero
from tests.helpers.late import LateAccelerator
from tests.helpers.small_models import adamw, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World

pytestmark = pytest.mark.mpi

STEPS = 3
Backward = Callable[[Tensor], None]


def here(loss: Tensor) -> None:
    """On the thread that calls."""
    loss.backward()


def apart(loss: Tensor) -> None:
    """On a thread of its own, which ends with it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def trained(
    world: World, backward: Backward, *, recomputes: bool, forwards: int, **options: Any
) -> tuple[list[float], dict[str, Tensor] | None]:
    """Losses of a few clipped steps of so many micro-batches; whole weights on rank 0."""
    model = tiny_gpt(checkpoint_activations=recomputes)
    losses = []
    optimizer = adamw(model, fused=True)
    with world.zeroified(model, optimizer, device=LateAccelerator(), **options):
        for step in range(STEPS):
            for micro in range(forwards):
                tokens = tiny_tokens(world.rank + 10 * micro + 100 * step)
                loss = model(tokens[:, :-1], tokens[:, 1:])
                backward(loss)
                losses.append(float(loss.detach()))
            hpczero.clip_grad_norm_(model, 1.0)
            update(optimizer)
        return losses, hpczero.full_state_dict(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "transport", [pytest.param("flat", marks=pytest.mark.ranks(1)), "ipc", "hierarchical"]
)
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_both_threads_leave_the_same_bits(world: World, stage, transport, recomputes, forwards):
    options = {"stage": stage, "transport": transport, "precision": "bf16"}
    options |= {"recomputes": recomputes, "forwards": forwards}
    losses, weights = trained(world, apart, **options)
    expected, its_weights = trained(world, here, **options)
    world.check_state(weights, its_weights)
    same = [loss.hex() for loss in losses] == [loss.hex() for loss in expected]
    world.check(same, f"{losses}, on the thread of forward {expected}")
