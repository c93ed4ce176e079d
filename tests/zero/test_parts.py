"""The update over long tensors: torch's result, torch's state between steps, and few calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.zero.update.optimizers import ELEMENTWISE
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, check_weights, distance, mlp_input, zeroified
from tests.zero.parts_models import ADAM, Branches, groups_of, lengths_stepped_on, loss_of, train

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])
# Rates at which five steps change much, and nothing overflows.
RATES = {"Adadelta": 1.0, "Rprop": 0.01, "SGD": 0.05}


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
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport="flat") as sharding:
        seen = lengths_stepped_on(monkeypatch)
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


def test_hook_that_comes_after_all_others_sees_the_pieces(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    seen: list[int] = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(sum(len(group["params"]) for group in optimizer.param_groups))

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with zeroified(model, optimizer, stage=0, topology=topology, transport="flat"):
        torch.optim.Optimizer.register_step_pre_hook(optimizer, hook)
        train(model, optimizer, range(comm.rank, comm.rank + 1), range(1))
        pieces = len(optimizer.param_groups[0]["params"])
        parallel_assert(comm, seen == [pieces] and pieces > 0, f"{seen} of {pieces}")


def test_step_that_somebody_has_patched_is_called(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    own = torch.optim.RAdam.step

    @functools.wraps(own)
    def timed(optimizer: torch.optim.RAdam, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(optimizer, *args, **options)

    model, plain = MLP(), MLP()
    monkeypatch.setattr(torch.optim.RAdam, "step", timed)
    optimizer, reference = (torch.optim.RAdam(m.parameters(), lr=0.01) for m in (model, plain))
    with zeroified(model, optimizer, stage=3, topology=topology, transport="flat"):
        train(model, optimizer, range(comm.rank, comm.rank + 1), range(7))
        train(plain, reference, range(comm.size), range(7))
        with hpczero.gathered(model):
            worst = distance(model, plain)
    parallel_assert(comm, worst < 2e-5 and len(calls) == 14, f"{worst}, {len(calls)} calls")


def test_steps_in_inference_mode_are_torchs(comm: MPI.Intracomm, topology: Topology) -> None:
    model, plain = MLP(), MLP()
    optimizer, reference = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    with zeroified(model, optimizer, stage=1, topology=topology, transport="flat"):
        for step in range(4):
            with torch.inference_mode(False):
                optimizer.zero_grad()
                loss_of(model, mlp_input(comm.rank) + step, step).backward()
                reference.zero_grad()
                for rank in range(comm.size):
                    (loss_of(plain, mlp_input(rank) + step, step) / comm.size).backward()
            with torch.inference_mode():
                optimizer.step()
                reference.step()
        check_weights(comm, model, plain, within=2e-5)
