"""Norms of single parameters: one exchange for all of one order, also where several orders are asked for by turns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, grad, mlp_backward, mlp_input, sgd, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ORDERS = (2.0, math.inf, 3.0)


def _count(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[], object]
) -> int:
    """How often ``owner.name`` is called in ``call``."""
    calls: list[str] = []
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        call()
    return len(calls)


@STAGES
def test_norms_of_several_orders_by_turns_take_one_exchange_each(
    comm: MPI.Intracomm, topology: Topology, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MLP()
    sum(plain(mlp_input(r)).square().sum() / comm.size for r in range(comm.size)).backward()
    expected = [float(grad(p).norm(order)) for p in plain.parameters() for order in ORDERS]
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        mlp_backward(model, comm.rank)
        found: list[float] = []

        def by_turns() -> None:
            found[:] = [float(grad(p).norm(order)) for p in model.parameters() for order in ORDERS]

        exchanges = _count(monkeypatch, sharding.collectives, "share", by_turns)
        parallel_assert(comm, exchanges == len(ORDERS), f"{exchanges} exchanges")
        parallel_assert(comm, found == pytest.approx(expected, rel=1e-5), f"{found} {expected}")


@STAGES
def test_a_norm_looks_for_no_other_slot_than_its_own(
    comm: MPI.Intracomm, topology: Topology, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology) as sharding:
        mlp_backward(model, comm.rank)

        def norms() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        walks = [_count(monkeypatch, u.optimized, "parts_of", norms) for u in sharding.units]
        parallel_assert(comm, not any(walks), f"all slots were looked through: {walks}")


@STAGES
def test_an_exchange_forgets_norms_of_other_orders_where_one_rank_saw_a_change(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        mlp_backward(model, comm.rank)
        first, second = list(model.parameters())[:2]
        before = float(grad(second).norm(2.0))  # of order 2 that of ``first`` is kept
        if stage == 0 or comm.rank == 0:  # at stage 0 every rank holds all pieces
            for parameter in optimizer.param_groups[0]["params"]:
                grad(parameter).zero_()
        largest, norm = float(grad(first).norm(math.inf)), float(grad(first).norm(2.0))
        most = 1.001 * largest * math.sqrt(grad(first).numel())
        parallel_assert(comm, largest <= 1.001 * norm <= 1.001 * most, f"an old norm: {norm}")
        parallel_assert(comm, len(set(comm.allgather(norm))) == 1)
        parallel_assert(comm, stage > 0 or norm == 0.0 < before)


def test_gradients_that_change_between_norms_of_one_order_are_refused(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, stage=0, topology=topology):
        mlp_backward(model, comm.rank)
        first, second = list(model.parameters())[:2]
        grad(first).norm(2.0)
        for parameter in optimizer.param_groups[0]["params"]:
            grad(parameter).mul_(0.5)
        with pytest.raises(StepError, match="changed between the norms of two parameters"):
            grad(second).norm(2.0)
