"""What tests of the delayed update share: batches, plain torch that steps one batch late, and a model that should.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from tests.helpers.late import LateAccelerator
from tests.helpers.small_models import MLP, adamw, mlp_input, same_state, update
from tests.helpers.world import World

# Whole vectors, however they are cut: fused kernels round what fills none in another way.
SIZES = (7, 128, 64, 64)
OFFLOAD = Offload("host", "host", window=2**14, buffers=4, step="host", delayed=True)

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach nesterov": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def backward(model: nn.Module, rank: int, step: int, *, scale: float = 1.0) -> None:
    """Of a batch of its own for every step and rank."""
    x = mlp_input(rank + 7 * step)
    (model(x).square().mean() * scale).backward()


class Late:
    """Plain torch on one process that steps with the gradients of the step before, and with that step's options."""

    def __init__(self, make: Maker) -> None:
        self.model = MLP(SIZES)
        self.optimizer = make(self.model.parameters())
        self._late: tuple[dict[str, Tensor], float] | None = None

    def step(self, gradients: dict[str, Tensor] | None, lr: float = 0.0) -> None:
        """Gradients of this step, and its learning rate; None: it is skipped."""
        self.finish()
        if gradients is not None:
            self._late = gradients, lr

    def finish(self) -> None:
        """Take the step that is late."""
        if self._late is not None:
            gradients, self.optimizer.param_groups[0]["lr"] = self._late
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self._late = None

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def gradients_of(
    world: World,
    weights: dict[str, Tensor],
    step: int,
    clip: float | None = None,
    parts: int = 1,
    precision: str = "fp32",
) -> dict[str, Tensor]:
    """Mean over ranks at ``weights``, reduced by a model that is sharded and does not step."""
    model = MLP(SIZES)
    model.load_state_dict(weights)
    options = {"stage": 2, "transport": "flat", "precision": precision}
    with world.zeroified(model, adamw(model), **options):
        for part in range(parts):
            with hpczero.accumulate(model, part, parts):
                backward(model, world.rank, step + 100 * part)
        if clip is not None:
            hpczero.clip_grad_norm_(model, clip)
        return hpczero.full_gradients(model)


def weights_now(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with; an update on its way stays there."""
    held = {}
    for unit in hpczero.sharding(model).units:
        unit.unshard()
        unit.whole.wait_for_unshard()
        for parameter, slot in zip(unit.parameters, unit.spec.layout.slots, strict=True):
            with torch._C.DisableTorchFunctionSubclass():
                held[slot.name] = parameter.detach().clone().float()
        unit.reshard()
    return held


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        update(optimizer)


def expect_steps(expected: Late, world: World, steps: range) -> None:
    for step in steps:
        expected.step(gradients_of(world, expected.weights, step), 1e-2)


def check_late(world: World, expected: Late, model: nn.Module, when: object = "") -> None:
    """The model computes with the weights of ``expected``. Collective."""
    right = same_state(expected.weights, weights_now(model))
    world.check(right, f"other weights {when}")


@contextmanager
def delayed(
    world: World, make: Maker = MAKERS["AdamW fused"], **options: Any
) -> Iterator[tuple[Late, MLP, Any]]:
    """Plain torch that is late, and a model that should be, with its optimizer; sharded inside. Collective."""
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    where = {"stage": 3, "device": LateAccelerator(), "transport": "flat", "offload": OFFLOAD}
    with world.zeroified(model, optimizer, **where | options):
        yield expected, model, optimizer
