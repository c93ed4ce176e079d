"""torch.compile, block by block and of the whole model: the same training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from hpczero.models import GPT, GPTConfig
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

SIZES = GPTConfig(vocab_size=101, context=16, layers=2, hidden=24, heads=2)


def losses(
    topology: Topology,
    stage: int,
    *,
    compiled: Literal["", "forwards", "blocks", "model", "model in place", "step"],
    transport: str = "auto",
    before: bool = False,
    precision: str = "fp32",
) -> list[float]:
    options: dict[str, Any] = {"stage": stage, "topology": topology}
    options |= {"transport": transport, "precision": precision}
    model = GPT(SIZES)
    model.initialize_all(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    if not before:
        hpczero.zeroify(model, optimizer, **options)
    called = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    if compiled == "model in place":
        model.compile(backend="aot_eager")
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if before:
        hpczero.zeroify(model, optimizer, **options)
    if compiled == "forwards":
        for block in model.blocks:
            # Without the backend's own arithmetic, so that not a bit may differ.
            block.forward = torch.compile(block.forward, backend="aot_eager")

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    if compiled == "step":
        update = torch.compile(update, backend="aot_eager")
    generator = torch.Generator().manual_seed(topology.rank)
    found = []
    for _ in range(3):
        tokens = torch.randint(101, (2, 17), generator=generator)
        loss = called(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        update()
        found.append(loss.item())
    hpczero.release(model)
    torch._dynamo.reset()  # what it keeps would stay for the tests that follow
    return found


# Dynamo looks at the gradients of what it finds, and imports what torch itself has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_compiled_forwards_train_the_same(comm: MPI.Intracomm, topology: Topology) -> None:
    eager, compiled = (losses(topology, 3, compiled=choice) for choice in ("", "forwards"))
    parallel_assert(comm, eager == compiled, f"{eager} {compiled}")


@pytest.mark.worth("torch.compile")
@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("stage", "what", "transport", "before"),
    [
        (0, "model", "window", False),
        (2, "model", "flat", True),
        (3, "model", "window", False),
        (3, "model", "window", True),
        (3, "model", "flat", False),
        (3, "model", "hierarchical", True),
        (3, "blocks", "window", False),
        (3, "blocks", "flat", True),
        (3, "model in place", "window", True),
        (3, "model in place", "flat", False),
    ],
)
def test_a_compiled_model_trains_the_same(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    what: Literal["blocks", "model", "model in place"],
    transport: str,
    before: bool,
) -> None:
    eager = losses(topology, stage, compiled="", transport=transport)
    compiled = losses(topology, stage, compiled=what, transport=transport, before=before)
    parallel_assert(comm, eager == compiled, f"{eager} {compiled}")


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"] if EVERYTHING else ["fp16"])
def test_a_compiled_model_trains_the_same_in_half_precision(
    comm: MPI.Intracomm, topology: Topology, precision: str
) -> None:
    eager = losses(topology, 3, compiled="", precision=precision)
    compiled = losses(topology, 3, compiled="model", precision=precision)
    parallel_assert(comm, eager == compiled, f"{eager} {compiled}")


@pytest.mark.worth("torch.compile")
@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3] if EVERYTHING else [3])
def test_a_compiled_update_trains_the_same(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    eager, compiled = (losses(topology, stage, compiled=choice) for choice in ("", "step"))
    close = all(abs(a - b) < 1e-5 * abs(a) for a, b in zip(eager, compiled, strict=True))
    parallel_assert(comm, close, f"{eager} {compiled}")


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_a_zeroified_model_is_not_traced(topology: Topology, stage: int, transport: str) -> None:
    model = GPT(SIZES)
    model.initialize_all(seed=0)
    hpczero.zeroify(model, None, stage=stage, topology=topology, transport=transport)
    with pytest.raises(StepError, match=r"was called by torch\.jit\.trace"):
        torch.jit.trace(model, (torch.zeros(2, 5, dtype=torch.long),))
    hpczero.release(model)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_compiled_while_gradients_are_there_trains_as_in_plain_torch(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    """A loop that zeroes gradients when it begins, and evaluates between: under no_grad all is compiled anew."""

    def train(model: torch.nn.Module, optimizer: Any, ranks: range, share: float) -> list[float]:
        called, found = torch.compile(model, backend="eager"), []
        for _ in range(2):
            optimizer.zero_grad()
            for rank in ranks:
                (called(mlp_input(rank)).square().mean() * share).backward()
            optimizer.step()
            with torch.no_grad():
                found.append(float(called(mlp_input(9)).sum()))
        torch._dynamo.reset()
        return found

    plain, model = MLP(), MLP()
    expected = train(plain, adamw(plain), range(comm.size), 1 / comm.size)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        found = train(model, optimizer, range(comm.rank, comm.rank + 1), 1.0)
    parallel_assert(comm, found == pytest.approx(expected, rel=1e-5), f"{found}, {expected}")
