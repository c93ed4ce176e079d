"""Splitting: what a fraction means in units, and the formulas that propose one."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from hpczero import Offload
from hpczero.errors import PlanError
from hpczero.models import GPT, GPTConfig
from hpczero.plan import Plan, Stage
from hpczero.plan.offloaded import (
    OffloadedPlan,
    Sides,
    cuts,
    least_fraction,
    short_fraction,
    units_away,
)


@pytest.mark.parametrize(
    ("fraction", "count"),
    [(0.0, 0), (1e-9, 1), (0.2, 1), (0.21, 2), (0.5, 2), (0.51, 3), (0.61, 4), (1.0, 4)],
)
def test_the_last_units_are_away_as_few_as_make_up_the_fraction(
    fraction: float, count: int
) -> None:
    assert units_away([40, 10, 30, 20], fraction) == count


def test_every_cut_is_the_fraction_of_its_own_number_of_units() -> None:
    dice = random.Random(5)
    for _ in range(300):
        sizes = [
            dice.randrange(1, 10 ** dice.randrange(1, 12)) for _ in range(dice.randrange(1, 40))
        ]
        found = [units_away(sizes, fraction) for fraction in cuts(sizes)]
        assert found == list(range(len(sizes) + 1))


def test_what_does_not_fit_goes_and_no_more() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=128, context=16, layers=6, hidden=32, heads=2))
    plan = Plan.build(
        model, num_shards=2, stage=3, rule=lambda model: [(f"blocks.{i}",) for i in range(6)]
    )
    sizes = [unit.layout.numel for unit in plan.trainable_units]

    def held(fraction: float) -> int:
        offload = Offload("host", "host", "host", window=2**14, buffers=3, fraction=fraction)
        return OffloadedPlan(plan, offload).memory().total

    everything = [held(fraction) for fraction in cuts(sizes)]
    for budget in everything:
        fraction = least_fraction(sizes, held, budget)
        assert fraction is not None
        assert held(fraction) <= budget
        before = everything[: cuts(sizes).index(fraction)]
        assert all(nbytes > budget for nbytes in before)
    assert least_fraction(sizes, held, min(everything) - 1) is None


def test_both_sides_end_together_at_the_balance() -> None:
    sides = Sides(host=7e9, device=6e10, down=4, up=2, device_to_host=2.5e10, host_to_device=2.5e10)
    numel = 10**9
    best = sides.balance
    assert 0 < best < 1
    host = best * numel * (1 / 7e9 + 4 / 2.5e10 + 2 / 2.5e10)
    assert math.isclose(host, (1 - best) * numel / 6e10)
    assert math.isclose(sides.step_s(numel, best), host)
    assert all(sides.step_s(numel, r / 100) >= host * (1 - 1e-12) for r in range(101))
    assert math.isclose(sides.step_s(numel, 1.0), numel * sides.host_s)
    assert math.isclose(sides.step_s(numel, 0.0), numel / 6e10)


def test_a_fraction_must_be_one_and_needs_something_elsewhere() -> None:
    for fraction in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(PlanError, match=r"offload\.fraction"):
            Offload("host", fraction=fraction).check(Stage.of(3))
    with pytest.raises(PlanError, match="nothing that rests elsewhere"):
        Offload(fraction=0.5).check(Stage.of(3))
    for fraction, parameters in itertools.product((0.0, 0.5, 1.0), ("device", "host")):
        Offload("host", "host", parameters, fraction=fraction).check(Stage.of(3))  # type: ignore[arg-type]


def test_a_short_fraction_means_the_same_units() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randint(1, 10**6) for _ in range(draw.randint(1, 60))]
        for count in range(1, len(sizes) + 1):
            fraction = short_fraction(sizes, count)
            assert 0 < fraction <= 1
            assert units_away(sizes, fraction) == count
    assert short_fraction([1] * 10, 3) == 0.3
    assert short_fraction([5, 1, 1], 3) == 1.0
