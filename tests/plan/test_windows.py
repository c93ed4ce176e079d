"""Windows: they are the whole shard, none is larger than asked for, and no long tensor is cut off its vectors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.plan.layout import ShardLayout
from hpczero.plan.offloaded import ALIGN, cut, runs_of_groups, windows_of

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
