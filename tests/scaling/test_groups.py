"""Who shares a round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.errors import ConfigError
from scaling.peers import make_groups

ANCHORS = ("floor", "peer", "absent")


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(60, 200))
def test_every_contender_meets_the_anchors_once_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    others = {f"contender-{i}": size for i, size in enumerate(sizes)}
    needs = {"floor": 4, **others, "peer": 6}
    groups = make_groups(needs, ANCHORS, limit)
    assert all({"floor", "peer"} <= set(group) for group in groups)
    assert all(sum(needs[name] for name in group) <= limit for group in groups)
    alone = [name for group in groups for name in group if name in others]
    assert sorted(alone) == sorted(others)
    assert all(group == [name for name in needs if name in group] for group in groups)


def test_what_fits_is_one_group() -> None:
    assert make_groups({"floor": 1, "a": 1, "b": 1}, ANCHORS, 3) == [["floor", "a", "b"]]


def test_groups_are_filled_before_a_new_one_is_made() -> None:
    groups = make_groups({"floor": 1, "a": 5, "b": 4, "c": 1}, ANCHORS, 7)
    assert groups == [["floor", "a", "c"], ["floor", "b"]]


@pytest.mark.parametrize("needs", [{"floor": 2**31}, {"floor": 2**30, "large": 2**30}])
def test_what_cannot_fit_is_refused_with_both_sizes(needs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"2\.0 GiB together, 1\.5 GiB may be used"):
        make_groups(needs, ANCHORS, 3 * 2**29)
