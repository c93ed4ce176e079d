"""Which cases are in the core: every value that a test names, each case on one number of ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers import cases
from tests.helpers.cases import Case, chequered, each_value, spread

STANDARD = [1, 2, 3, 4]


def full(*counts: int) -> list[Case]:
    """Every combination of parameters with so many values each."""
    return [dict(zip("abcde", values, strict=False)) for values in product(*map(range, counts))]


def values(cases: list[Case]) -> set[object]:
    return {item for case in cases for item in case.items()}


@given(st.data(), st.integers(0, 2**32))
def test_every_value_that_some_case_has_is_kept(data: st.DataObject, turn: int) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    whole = full(*counts)
    some = data.draw(st.lists(st.sampled_from(whole), min_size=1, unique_by=lambda c: str(c)))
    kept = each_value(some, turn)
    assert kept == sorted(set(kept))
    assert values([some[at] for at in kept]) == values(some)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 2**32))
def test_of_a_product_as_many_are_kept_as_the_longest_parameter_has_values(
    counts: list[int], turn: int
) -> None:
    assert len(each_value(full(*counts), turn)) == max(counts)


def test_turns_let_all_values_meet_between_them() -> None:
    whole = full(4, 3)
    met = {at for turn in range(len(whole)) for at in each_value(whole, turn)}
    assert met == set(range(len(whole)))


def test_a_table_of_chosen_cases_stays_whole() -> None:
    table: list[Case] = [{"given": n, "expected": -n} for n in range(5)]
    assert each_value(table, 3) == list(range(5))
    assert each_value([{}], 3) == [0]


@example(0, 1, {1, 4})
@given(st.integers(0, 2**32), st.integers(1, 40), st.sets(st.sampled_from(STANDARD), min_size=1))
def test_each_case_runs_on_one_number_of_ranks_and_many_cases_on_all(
    turn: int, many: int, sizes: set[int]
) -> None:
    chosen = spread([sorted(sizes)] * many, turn)
    assert all(len(of_case) == 1 and of_case <= sizes for of_case in chosen)
    assert chosen[0] <= {2, 3, 4} or sizes == {1}
    if many >= 8:
        assert set().union(*chosen) == sizes


def test_a_case_runs_where_it_may() -> None:
    chosen = spread([[2], [1, 4], [], [4]], 0)
    assert (chosen[0], chosen[2], chosen[3]) == ({2}, set(), {4})
    assert chosen[1] <= {1, 4}


def test_two_turns_have_every_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "EVERYTHING", False)
    stages, names = [0, 1, 2, 3], ["flat", "window", "ipc"]
    turns = [chequered(stages, names, turn) for turn in (0, 1)]
    assert sorted(turns[0] + turns[1]) == sorted(product(stages, names))
    for turn in turns:
        assert {stage for stage, _ in turn} == set(stages)
        assert {name for _, name in turn} == set(names)
    assert chequered(stages, ["auto"], 0) == [(stage, "auto") for stage in stages]
    monkeypatch.setattr(cases, "EVERYTHING", True)
    assert chequered(stages, names, 1) == list(product(stages, names))


def test_thirty_tests_at_most_are_in_the_core_for_their_worth() -> None:
    files = Path(__file__).parents[1].rglob("test_*.py")
    marked = sum(
        path.read_text(encoding="utf-8").count("@pytest.mark.worth" + "(") for path in files
    )
    assert 0 < marked <= 30, "mark another one slow: see CONTRIBUTING.md"
