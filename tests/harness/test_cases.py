"""Which cases run by default: nothing that a test says is lost, only combinations of three and more."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.pairwise import Case, chequered, dealt, pairwise, spread

STANDARD = [1, 2, 3, 4, 5]


def full(*counts: int) -> list[Case]:
    """Every combination of parameters with so many values each."""
    return [dict(zip("abcde", values, strict=False)) for values in product(*map(range, counts))]


def pairs(cases: list[Case]) -> set[object]:
    """Every two values of two parameters that a case has."""
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@given(st.data())
def test_every_pair_of_values_that_some_case_has_is_kept(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    whole = full(*counts)
    some = data.draw(st.lists(st.sampled_from(whole), min_size=1, unique_by=lambda c: str(c)))
    kept = [some[at] for at in pairwise(some)]
    assert pairs(kept) == pairs(some)
    assert {item for case in kept for item in case.items()} == {i for c in some for i in c.items()}


@pytest.mark.parametrize(
    ("counts", "most"), [((3,), 3), ((4, 3), 12), ((7, 3, 4), 30), ((2, 2, 2, 2, 4), 10)]
)
def test_no_more_is_kept_than_it_takes(counts: tuple[int, ...], most: int) -> None:
    assert len(pairwise(full(*counts))) <= most


def test_values_that_are_given_together_are_one_parameter() -> None:
    table: list[Case] = [{"given": n, "expected": -n, "stage": s} for n in range(5) for s in (0, 1)]
    assert pairwise(table) == list(range(10))


@example(0, 1, {1, 4, 5})
@given(st.integers(0, 2**32), st.integers(1, 40), st.sets(st.sampled_from(STANDARD), min_size=1))
def test_a_test_runs_on_two_numbers_of_ranks_and_each_case_on_one(
    turn: int, many: int, sizes: set[int]
) -> None:
    cases = full(many)
    chosen = spread(cases, [sorted(sizes)] * many, turn)
    assert all(of_case and of_case <= sizes for of_case in chosen)
    used = set().union(*chosen)
    assert len(used) >= min(2, len(sizes))
    assert used & {2, 3} or not sizes & {2, 3}
    assert used & {3, 5} or not sizes & {3, 5}
    if many >= 10:
        assert used == sizes


def test_a_stage_meets_every_number_of_ranks() -> None:
    cases = full(4, 3)
    chosen = spread(cases, [STANDARD] * 12, 0)
    assert {size for sizes in chosen for size in sizes} == set(STANDARD)
    stages = [{(c["a"], s) for c, of in zip(cases, chosen, strict=True) for s in of}]
    assert len(stages[0]) == 12


def test_a_case_runs_where_it_may() -> None:
    chosen = spread(full(4), [[2], [1, 4], [], [5]], 0)
    assert (chosen[0], chosen[2], chosen[3]) == ({2}, set(), {5})
    assert chosen[1] <= {1, 4}
    assert spread(full(1), [[]], 3) == [set()]


def test_all_numbers_of_ranks_occur_over_tests_of_one_case() -> None:
    found = [spread([{}], [STANDARD], turn)[0] for turn in range(12)]
    assert set().union(*found) == set(STANDARD)
    assert all(len(sizes) == 2 for sizes in found)


def test_two_turns_have_every_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCZERO_TEST_ALL", raising=False)
    stages, names = [0, 1, 2, 3], ["flat", "window", "ipc"]
    turns = [chequered(stages, names, turn) for turn in (0, 1)]
    assert sorted(turns[0] + turns[1]) == sorted(product(stages, names))
    for turn in turns:
        assert {stage for stage, _ in turn} == set(stages)
        assert {name for _, name in turn} == set(names)
    assert chequered(stages, ["auto"], 0) == [(stage, "auto") for stage in stages]
    monkeypatch.setenv("HPCZERO_TEST_ALL", "1")
    assert chequered(stages, names, 1) == list(product(stages, names))


def test_hands_have_every_case_once_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCZERO_TEST_ALL", raising=False)
    hands = [dealt(range(10), 3, hand) for hand in range(3)]
    assert sorted(case for hand in hands for case in hand) == [*range(10)]
    assert {len(hand) for hand in hands} == {3, 4}
    monkeypatch.setenv("HPCZERO_TEST_ALL", "1")
    assert dealt(range(10), 3, 1) == [*range(10)]
