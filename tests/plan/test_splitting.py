"""Splitting: what a fraction means in units, and the formulas that propose one."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero import Offload
from hpczero.errors import PlanError
from hpczero.models import GPT, GPTConfig
from hpczero.plan import Plan, Stage
from hpczero.plan.layout import ShardLayout
from hpczero.plan.offload import Activations
from hpczero.plan.offloaded import (
    ALIGN,
    OffloadedPlan,
    Sides,
    cut,
    cuts,
    least_fraction,
    runs_of_groups,
    short_fraction,
    units_away,
    windows_of,
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
        many = dice.randrange(1, 40)
        sizes = [dice.randrange(1, 10 ** dice.randrange(1, 12)) for _ in range(many)]
        found = [units_away(sizes, fraction) for fraction in cuts(sizes)]
        assert found == list(range(len(sizes) + 1))


def test_what_does_not_fit_goes_and_no_more() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=128, context=16, layers=6, hidden=32, heads=2))
    units: list[tuple[str, ...]] = [(f"blocks.{i}",) for i in range(6)]
    plan = Plan.build(model, num_shards=2, stage=3, rule=lambda model: units)
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
    for fraction, parameters in product((0.0, 0.5, 1.0), ("device", "host")):
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


# --- windows of a shard


sizes = st.lists(st.integers(0, 700), min_size=1, max_size=6)


@given(sizes=sizes, groups=st.data(), shards=st.integers(1, 5), most=st.integers(2 * ALIGN, 900))
def test_windows_cover_a_shard_and_cut_long_tensors_at_whole_vectors(
    sizes: list[int], groups: st.DataObject, shards: int, most: int
) -> None:
    """Any parameters, any groups, any number of shards, any size of window."""
    layout = ShardLayout.pack([(f"p{i}", (n,)) for i, n in enumerate(sizes)], shards)
    of = groups.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    covered = 0
    for rank in range(shards):
        runs = runs_of_groups(layout, of, rank)
        covered += sum(map(len, runs))
        windows = cut(layout.shard_numel, runs, most)
        assert [i for w in windows for i in w] == list(range(layout.shard_numel))
        assert max(map(len, windows), default=0) <= most
        for window in windows[1:]:
            inside = [run for run in runs if run.start < window.start < run.stop]
            assert all((window.start - run.start) % ALIGN == 0 for run in inside)
    assert covered == layout.numel


def test_neighbours_of_one_group_are_one_run_and_those_of_two_are_not() -> None:
    """By hand, on two ranks: [a a | b c] with c in another group, cut after 64 elements."""
    layout = ShardLayout.pack([("a", (50,)), ("b", (30,)), ("c", (20,))], 2)
    assert runs_of_groups(layout, [0, 0, 1], 0) == [range(64)]
    assert runs_of_groups(layout, [0, 0, 1], 1) == [range(16), range(16, 36)]


def test_a_window_smaller_than_two_vectors_is_refused() -> None:
    """Else a cut might not get on."""
    with pytest.raises(ValueError, match="at least 128"):
        cut(1000, [], 100)


@pytest.mark.parametrize("element_nbytes", [4, 16, 18, 22])
def test_all_parts_of_a_window_fit_into_a_block(element_nbytes: int) -> None:
    """Of fp32 numbers, and of a copy in half precision beside them."""
    layout = ShardLayout.pack([("a", (9000,)), ("b", (77,))], 2)
    windows = windows_of(layout, [0, 0], 0, 2**14, element_nbytes)
    assert max(map(len, windows)) * element_nbytes <= 2**14
    assert (max(map(len, windows)) + ALIGN) * element_nbytes > 2**14


# --- options of other types than they are declared


COUNTS = ["32MB", 32e6, True, np.int64(2**15), None]
FOLDERS = ["", b"/scratch", 5]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *product(["window", "buffers", "ahead"], COUNTS, ["a whole number"]),
        *product(["fraction"], ["0.5", None, True], ["a number from 0"]),
        *product(["folder"], FOLDERS, ["a path"]),
        ("delayed", "no", ""),
    ],
)
def test_options_of_an_offload_have_their_types(name: str, value: Any, expected: str) -> None:
    given: dict[str, Any] = {"folder": "here", name: value}
    with pytest.raises(PlanError, match=rf"offload\.{name}: got .*expected {expected}"):
        Offload("disk", **given).check(Stage.of(3))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *product(["window", "buffers"], COUNTS, ["a whole number"]),
        *product(["folder"], FOLDERS, ["a path"]),
    ],
)
def test_options_of_activations_have_their_types(name: str, value: Any, expected: str) -> None:
    given: dict[str, Any] = {"folder": "here", name: value}
    with pytest.raises(PlanError, match=rf"activations\.{name}: got .*expected {expected}"):
        Activations("block", "disk", **given).check(on_host=True)
