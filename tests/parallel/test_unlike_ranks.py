"""Tensor ranks that are given other data, options or a wrong rule: a named error on all, never each its own model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero
from hpczero.errors import CommError, StepError
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import Kept, Rule, Split, close, gpt_rule, split
from tests.helpers.small_models import raises_on_all
from tests.parallel.wholes import randomize, split_over, tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

STREAM = Kept.STREAM
RULE = Rule(
    {"norm": STREAM, "up": Split(0), "scale": Kept.INSIDE, "down": Split(1), "head": STREAM}
)


class Scale(nn.Module):
    """One factor for all features that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x * self.weight


class Net(nn.Module):
    """A block without token ids, which are compared by themselves."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.scale = nn.LayerNorm(6), nn.Linear(6, 7), Scale()
        self.down, self.head = nn.Linear(7, 6), nn.Linear(6, 3)
        self.dropout = dropout
        randomize(self, deviation=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 6) in, (B, T, 3) out."""
        x = F.dropout(x, self.dropout)
        x = x + self.down(torch.tanh(self.scale(self.up(self.norm(x)))))
        out: Tensor = self.head(x)
        return out


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(
    comm: MPI.Intracomm,
    *,
    rule: Rule = RULE,
    inputs: int = 1,
    targets: int = 2,
    factor: float = 1.0,
    rate: float = 0.1,
    max_norm: float = 1.0,
    dropout: float = 0.0,
    stage: int = 1,
    offload: hpczero.Offload | None = None,
    steps: int = 1,
    **degrees: int,
) -> None:
    """Steps of a split model; the same calls on every rank."""
    with tensor_ranks(comm, **degrees) as topology:
        model = split(Net(dropout), topology, rule)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        hpczero.zeroify(model, optimizer, topology=topology, stage=stage, offload=offload)
        try:
            for _ in range(steps):
                loss = F.mse_loss(model(drawn(inputs, 2, 4, 6)), drawn(targets, 2, 4, 3))
                (factor * loss).backward()
                hpczero.clip_grad_norm_(model, max_norm)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            hpczero.release(model)
            close(model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_that_do_the_same_are_let_through(comm: MPI.Intracomm, stage: int) -> None:
    train(comm, stage=stage)


WRONG: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    # what is said, and how a rank trains
    "targets": ("same samples, targets", lambda rank: {"targets": 2 + rank}),
    "loss": ("same samples, targets", lambda rank: {"factor": 1.0 + rank}),
    "masks": ("same seed", lambda rank: {"dropout": 0.5}),
    "rule": (
        r"'scale.weight'.*Kept\.INSIDE",
        lambda rank: {"rule": Rule({**RULE.layers, "scale": STREAM})},
    ),
    "learning rate": ("options of the optimizer", lambda rank: {"rate": 0.1 + rank}),
    "clipping": ("max_norm", lambda rank: {"max_norm": 0.1 + rank}),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", WRONG)
def test_what_tensor_ranks_do_otherwise_is_named_at_the_step(
    comm: MPI.Intracomm, what: str
) -> None:
    pattern, wrong = WRONG[what]
    torch.manual_seed(comm.rank)
    raises_on_all(comm, StepError, pattern, train, comm, **wrong(comm.rank))


AWAY: dict[str, tuple[int, dict[str, Any]]] = {  # stage, what more is on the host
    "host": (2, {}),
    "all on the host": (3, {"parameters": "host"}),
    "host steps": (1, {"step": "host"}),
    "delayed": (1, {"step": "host", "delayed": True}),
}


def on_host(**more: Any) -> hpczero.Offload:
    return hpczero.Offload(optimizer="host", gradients="host", **more)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", AWAY)
@pytest.mark.parametrize("what", ["rule", "masks"])
def test_gradients_that_rest_on_a_memory_tier_are_compared_too(
    comm: MPI.Intracomm, where: str, what: str
) -> None:
    stage, more = AWAY[where]
    offload = on_host(**more)
    train(comm, stage=stage, offload=offload, steps=3)
    pattern, wrong = WRONG[what]
    torch.manual_seed(comm.rank)
    how: dict[str, Any] = {"stage": stage, "offload": offload, **wrong(comm.rank)}
    raises_on_all(comm, StepError, pattern, train, comm, **how)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [1, 2])
def test_what_tensor_ranks_begin_to_do_otherwise_is_named_when_the_turn_of_its_unit_comes(
    comm: MPI.Intracomm, before: int
) -> None:
    def run(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            F.mse_loss(model(drawn(1, 2, 4, 6)), drawn(2, 2, 4, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with tensor_ranks(comm) as topology:
        model = split(Net(), topology, RULE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hpczero.zeroify(model, optimizer, topology=topology, stage=2, offload=on_host())
        run(model, optimizer, before)
        torch.manual_seed(comm.rank)
        model.dropout = 0.5
        units = len(hpczero.sharding(model).units)
        raises_on_all(comm, StepError, "same seed", lambda: run(model, optimizer, units))
        hpczero.release(model)
        close(model)


@pytest.mark.ranks(2, 3)
def test_other_inputs_are_named_in_the_forward(comm: MPI.Intracomm) -> None:
    raises_on_all(comm, CommError, "inputs of the model", lambda: train(comm, inputs=1 + comm.rank))


@pytest.mark.ranks(2)
def test_arguments_by_name_and_within_others_are_inputs_too(comm: MPI.Intracomm) -> None:
    class Masked(Net):
        def forward(self, x: Tensor, extra: dict[str, Tensor] | None = None) -> Tensor:
            """(B, T, 6) in, (B, T, 3) out."""
            assert extra is not None
            return super().forward(x) * extra["mask"]

    with split_over(comm, Masked(), RULE) as model:
        mask = torch.ones(2, 4, 1, dtype=torch.bool)
        x = drawn(1, 2, 4, 6)
        model(x, extra={"mask": mask})
        mask[0, 1] = comm.rank == 0
        raises_on_all(comm, CommError, "inputs of the model", model, x, extra={"mask": mask})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("odd", range(4))
def test_one_rank_that_does_otherwise_is_told_to_those_that_share_no_layer_with_it(
    comm: MPI.Intracomm, odd: int
) -> None:
    factor = 1.0 + (comm.rank == odd)
    said = "same samples, targets"
    raises_on_all(comm, StepError, said, train, comm, factor=factor, tensor=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inside", [True, False], ids=["own loss", "loss of logits"])
def test_another_loss_is_named_in_the_backward_where_every_rank_has_all_gradients_in_parts(
    comm: MPI.Intracomm, inside: bool
) -> None:
    """Under sequence parallelism gradients are sums over ranks, and so are equal whatever each rank has added."""
    config = GPTConfig(vocab_size=61, context=8, layers=1, hidden=12, heads=4)
    tokens = torch.arange(8)[None]
    with split_over(comm, GPT(config), gpt_rule(config), sequence=True) as model:

        def backward(factor: float) -> None:
            loss = model(tokens, tokens) if inside else model(tokens).square().mean()
            (factor * loss).backward()

        backward(2.0)
        raises_on_all(comm, CommError, "with .*gradient", lambda: backward(2.0 + comm.rank))
