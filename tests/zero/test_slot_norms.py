"""Norms of single parameters: one exchange for all of one order, also where several orders are asked for by turns."""

from __future__ import annotations

import math
from typing import Any

import pytest

import hpczero
from hpczero.errors import StepError
from tests.helpers.small_models import MLP, grad, mlp_backward, mlp_input, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ORDERS = (2.0, math.inf, 3.0)


@STAGES
def test_norms_of_several_orders_by_turns_take_one_exchange_each(world: World, stage, monkeypatch):
    plain = MLP()
    sum(plain(mlp_input(r)).square().sum() / world.size for r in range(world.size)).backward()
    expected = [float(grad(p).norm(order)) for p in plain.parameters() for order in ORDERS]
    with world.mlp(sgd, stage=stage) as (model, _):
        sharding = hpczero.sharding(model)
        mlp_backward(model, world.rank)
        share, exchanges = sharding.collectives.share, []

        def counted(*args: Any, **options: Any) -> Any:
            exchanges.append(args)
            return share(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(sharding.collectives, "share", counted)
            found = [float(grad(p).norm(order)) for p in model.parameters() for order in ORDERS]
        world.check(len(exchanges) == len(ORDERS), f"{len(exchanges)} exchanges")
        world.check(found == pytest.approx(expected, rel=1e-5), f"{found} {expected}")


@STAGES
def test_an_exchange_forgets_norms_of_other_orders_where_one_rank_saw_a_change(world: World, stage):
    with world.mlp(sgd, stage=stage) as (model, optimizer):
        mlp_backward(model, world.rank)
        first, second = list(model.parameters())[:2]
        before = float(grad(second).norm(2.0))  # of order 2 that of ``first`` is kept
        if stage == 0 or world.rank == 0:  # at stage 0 every rank holds all pieces
            for parameter in optimizer.param_groups[0]["params"]:
                grad(parameter).zero_()
        largest, norm = float(grad(first).norm(math.inf)), float(grad(first).norm(2.0))
        most = 1.001 * largest * math.sqrt(grad(first).numel())
        world.check(largest <= 1.001 * norm <= 1.001 * most, f"an old norm: {norm}")
        world.check(len(set(world.comm.allgather(norm))) == 1)
        world.check(stage > 0 or norm == 0.0 < before)


def test_gradients_that_change_between_norms_of_one_order_are_refused(world: World):
    with world.mlp(sgd, stage=0) as (model, optimizer):
        mlp_backward(model, world.rank)
        first, second = list(model.parameters())[:2]
        grad(first).norm(2.0)
        for parameter in optimizer.param_groups[0]["params"]:
            grad(parameter).mul_(0.5)
        with pytest.raises(StepError, match="changed between the norms of two parameters"):
            grad(second).norm(2.0)
