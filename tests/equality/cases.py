"""Case: one training run, written once and run by plain torch and by hpczero; and the parts it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpczero.models import GPT
from tests.equality import models
from tests.helpers.small_models import seeded

STEPS = 10


@dataclass(frozen=True)
class Place:
    """Where in a run a batch belongs."""

    step: int
    micro: int
    rank: int

    def generator(self) -> torch.Generator:
        """Random numbers of this place alone."""
        return torch.Generator().manual_seed(1 + self.rank + 100 * self.micro + 10_000 * self.step)


Batch = tuple[Any, ...]


def vectors(place: Place, width: int = 5, samples: int = 4) -> Batch:
    """Inputs (samples, width) and targets (samples, 3). Ranks see different scales, so a lost rank shows."""
    generator = place.generator()
    x = torch.randn(samples, width, generator=generator) * (1.0 + 0.5 * place.rank)
    return x, torch.randn(samples, 3, generator=generator)


def tokens(place: Place) -> Batch:
    """Tokens and targets (2, 9) for ``models.gpt``."""
    text = torch.randint(0, 61, (2, 10), generator=place.generator())
    return text[:, :-1], text[:, 1:]


def images(place: Place) -> Batch:
    """Images (4, 3, 8, 8) and labels for ``models.convnet``."""
    generator = place.generator()
    pixels = torch.randn(4, 3, 8, 8, generator=generator) * (1.0 + 0.5 * place.rank)
    return pixels, torch.randint(0, 5, (4,), generator=generator)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error; what lies between inputs and targets in ``batch`` goes to the model too."""
    *inputs, targets = batch
    return F.mse_loss(model(*inputs), targets)


def error_of_the_first(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the first of several outputs."""
    x, y = batch
    return F.mse_loss(model(x)[0], y)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself."""
    loss: Tensor = model(*batch)
    return loss


def adamw(model: nn.Module, *, eps: float = 1e-8) -> Optimizer:
    """AdamW with a learning rate and a decay large enough to show."""
    return torch.optim.AdamW(trainable(model), lr=3e-3, weight_decay=0.1, eps=eps)


def smooth_adamw(model: nn.Module) -> Optimizer:
    """AdamW for a GPT, some of whose gradients are rounding and nothing else: those of key biases are exactly zero.

    With the usual eps of 1e-8 Adam blows such a gradient up to a whole step in a random direction, in plain torch too.
    """
    return adamw(model, eps=1e-3)


def momentum(model: nn.Module) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(trainable(model), lr=0.02, momentum=0.9)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Lane:
    """One rank's part of one step: what a program may do, whoever runs it."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        *,
        step: int,
        rank: int,
        no_sync: Callable[[], AbstractContextManager[None]],
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.case, self.model, self.step, self.rank = case, model, step, rank
        self.no_sync = no_sync
        self._after_backward = after_backward

    def loss(self, micro: int = 0) -> Tensor:
        """Forward; dropout masks depend on the place alone."""
        place = Place(self.step, micro, self.rank)
        torch.manual_seed(place.generator().initial_seed())
        return self.case.loss(self.model, self.case.batch(place))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """As ``loss.backward``."""
        loss.backward(**options)
        self._after_backward()


Program = Callable[[Lane], float]


def one_backward(lane: Lane) -> float:
    """The plain step."""
    loss = lane.loss()
    lane.backward(loss)
    return loss.item()


def accumulate(lane: Lane) -> float:
    """Three micro-batches, each reduced by itself."""
    return sum(_part(lane, micro) for micro in range(3))


def accumulate_without_sync(lane: Lane) -> float:
    """Three micro-batches, reduced once."""
    with lane.no_sync():
        total = _part(lane, 0) + _part(lane, 1)
    return total + _part(lane, 2)


def _part(lane: Lane, micro: int) -> float:
    loss = lane.loss(micro) / 3
    lane.backward(loss)
    return loss.item()


PROGRAMS: dict[str, Program] = {
    "one backward": one_backward,
    "accumulation": accumulate,
    "accumulation without sync": accumulate_without_sync,
}


def evaluate(lane: Lane) -> list[float]:
    """Loss in evaluation mode, on samples no step sees."""
    training = lane.model.training
    lane.model.eval()
    with torch.no_grad():
        losses = [lane.loss(micro=50 + index).item() for index in range(2)]
    lane.model.train(training)
    return losses


def keep_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Sometimes zeros, sometimes None, by the optimizer or by the model."""
    zero_grad = optimizer.zero_grad if step % 4 < 2 else model.zero_grad
    zero_grad(set_to_none=step % 2 == 1)


def drop_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """As most loops do."""
    del model, step
    optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        build: the model, the same on every call.
        batch: what a rank trains on at a place.
        loss: forward.
        optimizer, scheduler: built from the model, from the optimizer.
        rule: which modules form units; None is the default.
        initialize: gives hpczero the first values of a model that ``build`` left on the meta device.
        program: forwards and backwards of one rank in one step; returns the loss.
        between: what a rank does after each step; its numbers are compared too.
        zero_grad: how gradients are forgotten.
        max_norm, norm_type: gradient clipping; infinity measures only.
        stages: at which it can run.
        transports: over which it runs at stage 3, where they differ most.
        steps: how many.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[Place], Batch] = vectors
    loss: Callable[[nn.Module, Batch], Tensor] = squared_error
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    rule: Callable[[nn.Module], list[tuple[str, ...]]] | None = None
    initialize: Callable[[str, Tensor], None] | None = None
    program: Program = one_backward
    between: Callable[[Lane], Sequence[float]] | None = None
    zero_grad: Callable[[nn.Module, Optimizer, int], None] = drop_gradients
    max_norm: float = torch.inf
    norm_type: float = 2.0
    stages: tuple[int, ...] = (0, 1, 2, 3)
    transports: tuple[str, ...] = ("auto",)
    steps: int = STEPS


def gpt_case(build: Callable[[], GPT], **changes: Any) -> Case:
    """Training of the project's GPT."""
    return Case(build, **({"batch": tokens, "loss": own_loss, "optimizer": smooth_adamw} | changes))


def seeded_case(build: Callable[[], nn.Module], **changes: Any) -> Case:
    """Training of a model of the zoo, which has the same values on every call."""
    return Case(lambda: seeded(build), **changes)


def convnet_case(build: Callable[[], nn.Module] = models.convnet, **changes: Any) -> Case:
    """Training of the project's conv net, of batch statistics."""
    return Case(build, **({"batch": images, "loss": own_loss, "optimizer": momentum} | changes))
