"""Construct: one habit of other people's code, written once, run by plain torch and by hpczero, told in one line.

Must not know: what drives it (`runner.py`). A construct's code is what a user would write without having heard of
hpczero; where the way out of a refusal needs a call of hpczero, it goes through `Training`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.helpers.small_models import seeded

# Of the largest magnitude in a tensor; the reason is in tests/equality/reference.py.
TOLERANCE = 1e-6
# Roundings to bf16: the ranks' factor comes before them in one process, after the sum in hpczero.
BF16 = 1e-2
T = TypeVar("T")
WIDTH = 6
Batch = Any
# What constructs are refused with more than once.
GIVEN_BACK = "is sharded and its memory given back"
SHARDED: dict[str, Any] = {"refused": GIVEN_BACK, "refused_stages": (3,)}
CHANGED: dict[str, Any] = {
    "refused": f"was changed in place since zeroify|{GIVEN_BACK}",
    "remark": "inside `gathered(model, modifier_rank=0)`",
}
NEW_MEMORY: dict[str, Any] = {
    "refused": f"got new memory since zeroify|{GIVEN_BACK}",
    "remark": "inside `gathered(model, modifier_rank=0)`, by `copy_`",
}


@dataclass(frozen=True)
class Place:
    """Whose batch it is, and when."""

    rank: int
    step: int
    micro: int = 0

    @property
    def seed(self) -> int:
        return 1 + self.rank + 100 * self.micro + 10_000 * self.step

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of this place alone, larger on higher ranks, so that a lost rank shows."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator) * (1.0 + 0.5 * self.rank)

    def integers(self, high: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 7)
        return torch.randint(0, high, shape, generator=generator)


class Training:
    """What a training loop has at hand; `runner.py` has the two kinds.

    Attributes:
        models, optimizers: what trains; mostly one of each.
        ranks: the ranks whose batches this process trains on.
        step: from 0.
        kept: whatever the construct keeps between steps.
        numbers: what the loop saw and would log; compared.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], construct: Construct
    ) -> None:
        self.models, self.optimizers, self.construct = list(models), list(optimizers), construct
        self.step = 0
        self.kept: dict[str, Any] = {}
        self.numbers: list[float] = []

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def mean(self, value: Callable[[Place], Tensor], micro: int = 0) -> Tensor:
        """The loss ``value`` of this process: its own, or where one process stands for all ranks, their mean."""
        raise NotImplementedError

    def loss(self, micro: int = 0) -> Tensor:
        """The construct's loss, likewise."""
        construct, subject = self.construct, self.construct.subject(self)
        return self.mean(lambda place: construct.loss(subject, construct.batch(place)), micro)

    def note(self, number: float | Tensor) -> None:
        """Something the loop would log, the same on all ranks."""
        self.numbers.append(float(torch.as_tensor(number).detach()))

    def whole(self, model: nn.Module, *, change: bool = False) -> AbstractContextManager[None]:
        """Parameters may be read inside; with ``change`` also written."""
        del model, change
        return nullcontext()


def sgd(model: nn.Module) -> Optimizer:
    """SGD: unlike Adam's, its updates show a gradient that is scaled wrongly."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def vectors(place: Place) -> Batch:
    """Inputs (4, 6) and targets (4, 3)."""
    return place.normal(4, WIDTH), Place(place.rank, place.step, 50).normal(4, 3)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Of the model's output."""
    *inputs, targets = batch
    return F.mse_loss(model(*inputs), targets)


def plain_step(training: Training) -> None:
    """As in every tutorial."""
    training.optimizer.zero_grad()
    training.construct.backward(training)
    training.optimizer.step()


def plain_backward(training: Training) -> None:
    training.loss().backward()


def the_model(training: Training) -> nn.Module:
    return training.model


def nothing(training: Training) -> None:
    """No preparation."""


def one_part(model: nn.Module) -> list[nn.Module]:
    return [model]


@dataclass(frozen=True)
class Construct:
    """One line of docs/compatibility.md.

    Attributes:
        name: short, unique; the test's id.
        says: what the code does, in the words of the table.
        build: the model, the same on every call.
        batch: what a rank trains on at a place.
        loss: of a model on a batch.
        step: one step of training in the foreign manner.
        backward: what the plain step does between ``zero_grad`` and ``optimizer.step``.
        optimizer: one for each part.
        parts: the models in ``build()`` that are sharded each by itself.
        before, after: what the user does with model and optimizer before zeroify, and after it.
        subject: what ``loss`` calls, if the user has wrapped the model.
        refused: words of the error, with "|" between those of several stages; empty if it works.
        stages: where it was tried.
        refused_stages: where it is refused, of ``stages``; elsewhere it works. None: at all.
        precision: of hpczero; the reference is always fp32.
        ranks: where it is tried; None: 2, and 1 by its name.
        tolerance: another than that of rounding in fp32.
        by_torch: the error is torch's own, as without hpczero.
        remark: the way out, or what to know.
        steps: how many.
    """

    name: str
    says: str
    build: Callable[[], nn.Module]
    batch: Callable[[Place], Batch] = vectors
    loss: Callable[[Any, Batch], Tensor] = squared_error
    step: Callable[[Training], None] = plain_step
    backward: Callable[[Training], None] = plain_backward
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    parts: Callable[[nn.Module], list[nn.Module]] = one_part
    before: Callable[[Training], None] = nothing
    after: Callable[[Training], None] = nothing
    subject: Callable[[Training], Any] = the_model
    refused: str = ""
    stages: tuple[int, ...] = (0, 3)
    refused_stages: tuple[int, ...] | None = None
    precision: str = "fp32"
    ranks: tuple[int, ...] | None = None
    tolerance: float = TOLERANCE
    by_torch: bool = False
    remark: str = ""
    steps: int = 3

    def expects(self, stage: int) -> str:
        """What the error must say at ``stage``; empty if it has to work."""
        stages = self.stages if self.refused_stages is None else self.refused_stages
        return self.refused if stage in stages else ""


class Residual(nn.Module):
    """The innocent block: two layers beside a shortcut."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 1)
        self.outer = nn.Linear(width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(x)))
        return y


class Net(nn.Module):
    """Three blocks in a list, each a unit, between two layers of the root unit."""

    def __init__(self, block: Callable[[], nn.Module] = Residual, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.read(self.through(self.stem(x))))

    def through(self, x: Any) -> Any:
        """What comes out of the last block."""
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block: Any, x: Any) -> Any:
        """One block; what comes out is given to the next one."""
        return block(x)

    def read(self, x: Any) -> Any:
        """The tensor in it for the head."""
        return x


def net(
    block: Callable[[], nn.Module] = Residual,
    kind: Callable[..., nn.Module] = Net,
    *,
    change: Callable[[Any], object] = lambda model: None,
    **methods: Callable[..., Any],
) -> Callable[[], nn.Module]:
    """Builds ``kind`` of three ``block``, changed by ``change``; ``call`` and ``read`` stand for its methods."""

    def build() -> nn.Module:
        model = kind(block)
        change(model)
        model.__dict__.update(methods)
        return model

    return lambda: seeded(build)


def in_blocks(change: Callable[[Any], object]) -> Callable[[Any], None]:
    """For ``net``: changes each block."""

    @wraps(change)
    def each(model: Any) -> None:
        for block in model.blocks:
            change(block)

    return each


class Wrapper(nn.Module):
    """What a framework puts around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def wrap(training: Training) -> None:
    training.kept["wrapper"] = Wrapper(training.model)


def the_wrapper(training: Training) -> Any:
    return training.kept["wrapper"]


def said(code: object) -> str:
    """The first line of its docstring."""
    return (code.__doc__ or "").partition("\n")[0].removesuffix(".")


class Habits(list[Construct]):
    """The constructs of one table.

    A decorator adds one: what stands below it is that part of the construct, and the first line of its docstring is the
    line of the table. ``more`` is what else differs from the innocent net and the plain step, by the names of
    ``Construct`` and ``net``; ``model`` is the ``kind`` of net.
    """

    def add(
        self,
        name: str,
        says: str,
        *,
        build: Callable[[], nn.Module] | None = None,
        block: Callable[[], nn.Module] = Residual,
        model: Callable[..., nn.Module] = Net,
        change: Callable[[Any], object] = lambda model: None,
        **more: Any,
    ) -> None:
        """A construct without code of its own."""
        methods = {each: more.pop(each) for each in ("call", "read") if each in more}
        build = build or net(block, model, change=change, **methods)
        self.append(Construct(name, says, build, **more))

    def part(self, part: str, name: str, more: dict[str, Any]) -> Callable[[T], T]:
        def add(code: T) -> T:
            self.add(name, said(code), **more | {part: code})
            return code

        return add

    def build(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("build", name, more)

    def block(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("block", name, more)

    def model(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("model", name, more)

    def change(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("change", name, more)

    def call(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("call", name, more)

    def batch(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("batch", name, more)

    def loss(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("loss", name, more)

    def optimizer(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("optimizer", name, more)

    def step(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("step", name, more)

    def backward(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("backward", name, more)

    def before(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("before", name, more)

    def after(self, name: str, **more: Any) -> Callable[[T], T]:
        return self.part("after", name, more)
