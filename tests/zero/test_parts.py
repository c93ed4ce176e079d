"""The update over long tensors: torch's result, torch's state between steps, and few calls."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.zero.update.optimizers import ELEMENTWISE
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, distance, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

# torch.optim hides the module behind a name that it deletes.
ADAM = importlib.import_module("torch.optim.adam")
STAGES = pytest.mark.parametrize("stage", [0, 1, 3])
# Rates at which five steps change much, and nothing overflows.
RATES = {"Adadelta": 1.0, "Rprop": 0.01, "SGD": 0.05}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as loops do that decay weights alone: neighbours lie in different groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases}]


class Branches(nn.Module):
    """One unit of several layers, of which each step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """(batch, 7) in and out; a layer that is left out of a step has no gradient in it."""
        for place, layer in enumerate(self.layers):
            if (step + place) % 3 or place == 2:
                x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    found: Tensor = model(x, step) if isinstance(model, Branches) else model(x)
    return found.square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range, steps: range) -> None:
    """Steps on the mean over ``ranks`` of their losses."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, mlp_input(rank) + step, step) / len(ranks)).backward()
        optimizer.step()


@STAGES
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [MLP, Branches])
def test_every_known_optimizer_gives_torchs_result(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    kind: type[torch.optim.Optimizer],
    make: type[nn.Module],
) -> None:
    model, plain = make(), make()
    options: dict[str, Any] = {"lr": RATES.get(kind.__name__, 0.01)}
    if "momentum" in kind.__init__.__annotations__:
        options["momentum"] = 0.9
    decays = "weight_decay" in kind.__init__.__annotations__
    make_optimizer: Any = kind
    optimizer, reference = (
        make_optimizer(groups_of(each) if decays else each.parameters(), **options)
        for each in (model, plain)
    )
    with zeroified(model, optimizer, stage=stage, topology=topology, transport="flat"):
        train(model, optimizer, range(comm.rank, comm.rank + 1), range(5))
        train(plain, reference, range(comm.size), range(5))
        with hpczero.gathered(model):
            worst = distance(model, plain)
    # Signs of tiny gradients decide Rprop's steps.
    limit = 0.05 if kind.__name__ == "Rprop" else 2e-5
    parallel_assert(comm, worst < limit, f"differs by {worst} from torch")


@STAGES
def test_one_call_takes_as_many_tensors_as_units_have_groups(
    comm: MPI.Intracomm, topology: Topology, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    adam = ADAM.adam

    def watched(parameters: list[Tensor], *args: Any, **options: Any) -> None:
        seen.append([p.numel() for p in parameters])
        adam(parameters, *args, **options)

    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport="flat") as sharding:
        monkeypatch.setattr(ADAM, "adam", watched)
        train(model, optimizer, range(comm.rank, comm.rank + 1), range(2))
        held = [unit.optimized.master.numel() for unit in sharding.units if unit.shards]
    calls = [lengths for lengths in seen if lengths]
    ranks = comm.size if stage == 0 else 1
    parallel_assert(comm, len(calls) == (2 if held else 0), f"{seen}")
    few = all(len(lengths) <= len(held) * ranks for lengths in calls)
    parallel_assert(comm, few, f"{calls}")


@STAGES
def test_state_between_steps_is_by_pieces_and_of_their_shapes(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport="flat"):
        train(model, optimizer, range(comm.rank, comm.rank + 1), range(4))
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
        keys = {id(key) for key in optimizer.state}
        parallel_assert(comm, keys == {id(p) for p in pieces})
        states = [(piece, optimizer.state[piece]) for piece in pieces]
        names = all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for _, state in states)
        parallel_assert(comm, names)
        shapes = all(state["exp_avg"].shape == piece.shape for piece, state in states)
        parallel_assert(comm, shapes)
        counts = [state["step"] for _, state in states]
        counted = all(count.dim() == 0 and float(count) in (2.0, 3.0, 4.0) for count in counts)
        parallel_assert(comm, counted, f"{counts}")


def _reset_one(optimizer: torch.optim.Optimizer) -> None:
    """Forget the state of the first group."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state.pop(parameter, None)


def _begin_counting_again(optimizer: torch.optim.Optimizer) -> None:
    """Change the counters of one group in place."""
    for parameter in optimizer.param_groups[1]["params"]:
        optimizer.state[parameter]["step"].zero_()


def _other_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Put other tensors there."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        state["exp_avg"] = state["exp_avg"] * 0.5


def _in_place(optimizer: torch.optim.Optimizer) -> None:
    """Change the tensors that are there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["exp_avg_sq"].mul_(2.0)


def _round_trip(optimizer: torch.optim.Optimizer) -> None:
    """Through torch's own state_dict."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _without_biases(optimizer: torch.optim.Optimizer) -> None:
    """A group that steps no more."""
    optimizer.param_groups[1]["params"] = []


def _in_another_order(optimizer: torch.optim.Optimizer) -> None:
    """Groups are lists of the user's."""
    optimizer.param_groups[0]["params"].reverse()


def _own_entry(optimizer: torch.optim.Optimizer) -> None:
    """Something that torch knows nothing of."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["seen"] = [1]


EDITS = [
    _reset_one,
    _begin_counting_again,
    _other_tensors,
    _in_place,
    _round_trip,
    _without_biases,
    _in_another_order,
    _own_entry,
]


@STAGES
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__.strip("_"))
def test_what_a_loop_does_to_the_state_counts(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    edit: Callable[[torch.optim.Optimizer], None],
) -> None:
    model, plain = Branches(), Branches()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    reference = torch.optim.AdamW(groups_of(plain), lr=0.01)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport="flat"):
        for steps in (range(4), range(4, 8)):
            train(model, optimizer, range(comm.rank, comm.rank + 1), steps)
            train(plain, reference, range(comm.size), steps)
            if steps.start == 0:
                edit(optimizer)
                edit(reference)
        with hpczero.gathered(model):
            worst = distance(model, plain)
    parallel_assert(comm, worst < 2e-5, f"differs by {worst} from torch")


def test_a_step_that_raises_leaves_the_groups_as_they_were(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise MemoryError("none left")

    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with zeroified(model, optimizer, stage=3, topology=topology, transport="flat"):
        before = [id(p) for p in optimizer.param_groups[0]["params"]]
        with monkeypatch.context() as patch:
            patch.setattr(ADAM, "adam", broken)
            with pytest.raises(MemoryError):
                train(model, optimizer, range(comm.rank, comm.rank + 1), range(1))
        after = [id(p) for p in optimizer.param_groups[0]["params"]]
        parallel_assert(comm, before == after)
        keys = {id(key) for key in optimizer.state}
        parallel_assert(comm, keys <= set(after), "no long tensor stays a key")
