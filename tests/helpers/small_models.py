"""What the tests of the core share: small models with awkward sizes, sharded for one test; errors on all ranks.

Must not know: what any test looks for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import HpcZeroError
from hpczero.models import GPT, GPTConfig
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI

M = TypeVar("M", bound=nn.Module)
# Unit sizes that neither 64 nor 2 to 5 ranks divide.
TINY = {"vocab_size": 61, "context": 11, "layers": 2, "hidden": 18, "heads": 2}


def seeded(build: Callable[[], M], seed: int = 5) -> M:
    """``build()`` with the same values on every call, none of them zero.

    A tensor that starts at zero holds its updates alone, and ten roundings are much of those.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_gpt(seed: int = 1, **changes: Any) -> GPT:
    """A GPT of about 10,000 parameters, the same on every rank."""
    model = GPT(GPTConfig(**{**TINY, **changes}))
    model.initialize_all(seed=seed)
    return model


def tiny_tokens(rank: int, *, batch: int = 2, seq_len: int = 9) -> Tensor:
    """(batch, seq_len) int64, other ones on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(TINY["vocab_size"], (batch, seq_len), generator=generator)


class MLP(nn.Module):
    """Three linear layers in a list, so that each is a unit; shapes that divide by nothing."""

    def __init__(self, sizes: tuple[int, ...] = (7, 15, 15, 3), seed: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(size_in, size_out), nn.Tanh())
            for size_in, size_out in itertools.pairwise(sizes)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sizes[0]) in, (batch, sizes[-1]) out."""
        for layer in self.layers:
            x = layer(x)
        return x


def mlp_input(rank: int) -> Tensor:
    """(4, 7) fp32, other values on every rank."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(200 + rank))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD over all parameters; unlike Adam's, its steps show how long a gradient is."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def grad(parameter: Any) -> Any:
    """``parameter.grad``, for a type checker that knows it may be None."""
    return parameter.grad


@contextmanager
def zeroified(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    **options: Any,
) -> Iterator[hpczero.Sharding]:
    """``model`` is sharded inside and released afterwards. Collective; options go to ``zeroify``."""
    hpczero.zeroify(model, optimizer, **options)
    sharding = hpczero.sharding(model)
    try:
        yield sharding
    finally:
        hpczero.release(model)


def raises_on_all(
    comm: MPI.Intracomm,
    kind: type[Exception],
    pattern: str,
    call: Callable[..., object],
    *args: Any,
    **options: Any,
) -> str:
    """``call(*args, **options)`` raises ``kind`` with a message like ``pattern`` on every rank, agreed.

    So no rank is left waiting. Collective over ``comm``.

    Returns:
        This rank's message.
    """
    __tracebackhide__ = True
    error: Exception | None = None
    try:
        call(*args, **options)
    except Exception as caught:  # judged below, on every rank
        error = caught
    said = f"{type(error).__name__}: {error}"
    parallel_assert(comm, type(error) is kind and re.search(pattern, str(error)), said)
    agreed = not isinstance(error, HpcZeroError) or error.agreed
    parallel_assert(comm, agreed, f"not agreed, so one rank's exit would end the job: {said}")
    return str(error)


def values(sharding: hpczero.Sharding) -> list[Tensor]:
    """Copies of all fp32 values. Collective."""
    return [unit.gather_values() for unit in sharding.units]


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether all tensors are equal in every bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_state(found: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor] | None) -> bool:
    """In names, dtypes and every bit; None is what ranks other than 0 have of a full state."""
    if found is None or expected is None:
        return found is None
    return found.keys() == expected.keys() and all(
        value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        for name, value in found.items()
    )


Loss = Callable[..., Tensor]
"""Of a model on a rank's input."""


def squares(model: nn.Module, rank: int) -> Tensor:
    """Of an ``MLP``: the mean."""
    loss: Tensor = model(mlp_input(rank)).square().mean()
    return loss


def mlp_backward(model: nn.Module, rank: int) -> None:
    """Forward and backward of an ``MLP`` on this rank's input."""
    model(mlp_input(rank)).square().sum().backward()


def update(*optimizers: torch.optim.Optimizer) -> None:
    """A step of each, whose gradients are then dropped."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mlp_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int = 1
) -> None:
    """So many steps of an ``MLP``, all on this rank's one input."""
    for _ in range(count):
        mlp_backward(model, rank)
        update(optimizer)


def distance(model: nn.Module, other: nn.Module) -> float:
    """Largest difference between elements of their parameters, which are whole."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def check_weights(
    comm: MPI.Intracomm, model: nn.Module, plain: nn.Module, *, within: float
) -> None:
    """The parameters are those of ``plain``, which was trained in one process. Collective."""
    with hpczero.gathered(model):
        worst = distance(model, plain)
    parallel_assert(comm, worst < within, f"differs by {worst} from one process")


def check_trains(
    comm: MPI.Intracomm, model: nn.Module, optimizer: Any, plain: nn.Module | None = None
) -> None:
    """After whatever happened, a step from the present values equals one of a plain copy, on the mean gradient."""
    state = hpczero.full_state_dict(model)
    plain = plain or MLP()
    plain.load_state_dict(comm.bcast(state, root=0))
    reference = adamw(plain)
    sum(plain(mlp_input(r)).square().sum() / comm.size for r in range(comm.size)).backward()
    for group in optimizer.param_groups:  # the same first step of Adam
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    reference.step()

    optimizer.zero_grad()
    mlp_backward(model, comm.rank)
    optimizer.step()
    optimizer.zero_grad()
    check_weights(comm, model, plain, within=1e-5)
