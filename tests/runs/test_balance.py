"""Uneven shares of samples: by what ranks take for them, with the loss and the weights of one process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpczero.accelerator import HostAccelerator
from hpczero.data.batches import positions
from hpczero.errors import ConfigError
from hpczero.options.reading import read_run_config
from hpczero.run.balance import EVERY, Balance, WorkTime, balance_of, divided
from hpczero.run.evaluation import PlainPasses
from hpczero.run.step import TrainingStep
from tests.helpers.world import World

EVEN, GLOBAL = (
    4,
    32,
)  # samples of a rank and micro-batch, and of a step of 4 ranks and 2 micro-batches


def test_samples_go_to_whoever_is_through_first() -> None:
    fast, slow = WorkTime(5.0, 10.0), WorkTime(15.0, 30.0)
    assert divided(24, [fast, fast, fast, slow], 12) == [8, 7, 7, 2]
    assert divided(24, [fast] * 4, 12) == [6, 6, 6, 6]
    assert divided(24, [fast, WorkTime(0.0, 1e6), WorkTime(0.0, 1e6)], 20) == [
        20,
        2,
        2,
    ]  # at most 20
    assert divided(6, [fast, slow, slow], 4) == [2, 2, 2]  # no rank has one sample alone


def test_what_is_fixed_is_told_from_two_numbers_of_samples() -> None:
    assert WorkTime.fitted({6: 60.0}) == WorkTime(0.0, 10.0)
    assert WorkTime.fitted({6: 65.0, 8: 85.0}) == WorkTime(5.0, 10.0)
    assert WorkTime.fitted({6: 90.0, 8: 40.0}) == WorkTime(
        36.0, 0.5
    )  # fewer seconds for more samples: disturbed


@pytest.mark.parametrize("shares", [None, [1, 5, 3, 7]])
def test_shares_are_runs_of_the_same_samples(shares: list[int] | None) -> None:
    found = [
        positions(GLOBAL, 3, micro, rank, 4, 2, shares) for micro in (0, 1) for rank in range(4)
    ]
    assert [each for part in found for each in part.tolist()] == list(range(96, 128))
    for wrong in ([4, 4, 4], [0, 8, 4, 4], [4, 4, 4, 5]):
        with pytest.raises(ConfigError, match="got shares"):
            positions(GLOBAL, 3, 0, 0, 4, 2, wrong)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def rows(places: Iterable[Any]) -> tuple[Tensor, Tensor]:
    x = torch.stack(
        [torch.randn(6, generator=torch.Generator().manual_seed(int(p))) for p in places]
    )
    return x, x.square().sum(1, keepdim=True)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_slow_rank_gets_fewer_samples_and_the_loss_stays(world: World, stage, caplog):
    slow = 0.003 if world.rank == 3 else 0.001

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        time.sleep(slow * len(batch[0]))
        return loss_of(model, *batch)

    model, plain = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = torch.optim.SGD(plain.parameters(), lr=0.01)
    balance = Balance(world.topology, EVEN)
    with world.zeroified(model, optimizer, stage=stage) as sharding:
        sharding.advice.weighted = True
        accelerator = HostAccelerator()
        step = TrainingStep(
            model,
            optimizer,
            passes=PlainPasses(
                model, loss=loss, accumulation=2, accelerator=accelerator, balance=balance
            ),
            samples=lambda number, micro: rows(
                positions(GLOBAL, number, micro, world.rank, 4, 2, balance.shares)
            ),
            accelerator=accelerator,
        )
        said = []
        for number in range(EVERY + 3):
            taken = step.take(number)
            expected = loss_of(plain, *rows(range(GLOBAL * number, GLOBAL * (number + 1))))
            expected.backward()
            steps.step()
            steps.zero_grad()
            world.check(abs(taken.loss / expected.item() - 1) < 1e-6, (taken.loss, expected))
            balance.note(taken.own_s)
            said.append(balance.decide())
        world.check(
            [bool(line) for line in said] == [number == EVERY - 1 for number in range(EVERY + 3)],
            said,
        )
        world.check("rank 3 works" in said[EVERY - 1], said)
        world.check(balance.shares[3] < EVEN < max(balance.shares), balance.shares)
        world.check(sum(balance.shares) == 4 * EVEN, balance.shares)
        world.check_weights(model, plain, within=1e-6)
    world.check("different sizes" not in caplog.text, caplog.text)


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_where_shares_cannot_be_uneven_the_option_is_refused(world: World):
    for words, said in (
        (["--parallel.tensor", "2"], "parallel.tensor is 2"),
        (["--parallel.pipeline", "2"], "parallel.pipeline is 2"),
        ([], "micro-batches of 1"),
    ):
        config = read_run_config(["--train.balance", "true", *words])
        with pytest.raises(ConfigError, match=f"train.balance: got true.*{said}"):
            balance_of(config, world.topology, 1)
    config = read_run_config([])
    world.check(balance_of(config, world.topology, 1) is None)
