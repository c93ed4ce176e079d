"""Runs at even distances against lists of single elements, and that no number of runs takes a loop in Python."""

from __future__ import annotations

import sys
from math import prod
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoint.exchange import EvenRuns, StridedRange
from hpczero.checkpoint.held import ParameterPiece, piece_of
from hpczero.plan.placement import Placement

UNIT: Any = None  # arithmetic does not look at it


def listed(entry: StridedRange) -> list[int]:
    """By the definition."""
    return [
        e for e in range(entry.start, entry.stop) if (e - entry.base) % entry.stride < entry.length
    ]


@st.composite
def entries(draw: st.DrawFn) -> StridedRange:
    length = draw(st.integers(1, 5))
    stride = length + draw(st.integers(0, 4))
    base = draw(st.integers(-7, 7))
    start = base + draw(st.integers(0, 25))
    return StridedRange(start, start + draw(st.integers(0, 40)), base, stride, length)


@given(entries(), st.integers(-3, 80), st.integers(0, 60))
def test_counts_and_places_are_those_of_the_listed_elements(
    entry: StridedRange, first: int, width: int
) -> None:
    window = range(first, first + width)
    inside = [e for e in listed(entry) if e in window]
    assert entry.numel == len(listed(entry))
    assert [entry.at(index) for index in range(entry.numel)] == listed(entry)
    assert listed(entry.clipped(window)) == inside
    before = [entry.before(element) for element in (window.start, window.stop)]
    assert before[1] - before[0] == len(inside)


@given(entries())
def test_elements_are_scattered_and_gathered_in_order(entry: StridedRange) -> None:
    runs, elements = EvenRuns.of([entry]), np.array(listed(entry), dtype=np.int64)
    start, stop = min(entry.start, 0), max(entry.stop, 100)
    window = np.arange(start, stop, dtype=np.float32)
    found = np.full(len(elements), -1, dtype=np.float32)
    runs.gather(window, start, found)
    assert found.tolist() == elements.tolist()
    empty = np.zeros_like(window)
    runs.scatter(found, empty, start)
    expected = np.zeros_like(window)
    expected[elements - start] = elements
    assert np.array_equal(empty, expected)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    strips, grain, grains = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
    )
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    shape = (*shape[:dim], strips * grain * grains, *shape[dim + 1 :])
    parts = draw(st.integers(1, 4))
    part = draw(st.integers(0, parts - 1))
    return Placement("p", shape, dim, strips, grain, part, parts)


@given(placements(), st.integers(1, 4), st.integers(0, 50))
def test_a_shard_of_a_part_is_where_placement_says(
    placement: Placement, shards: int, place: int
) -> None:
    """The whole parameter is in the file from ``place`` on; the part begins at element 5 of its unit."""
    numel, whole = placement.local_numel, torch.arange(prod(placement.shape)) + place
    local = torch.full(placement.local_shape, -1)
    placement.take(whole.view(placement.shape) + 1, local)
    flat = local.view(-1).numpy() - 1  # -1: padding
    size = -(-numel // shards)
    for shard in range(shards):
        part = range(min(shard * size, numel), min(shard * size + size, numel))
        if not part:
            continue
        piece = piece_of(UNIT, 0, part, 5 - part.start, placement, place, True)
        own = flat[part.start : part.stop]
        assert (piece.begin, piece.span, piece.numel) == (5, len(own), int((own >= 0).sum()))
        if piece.numel:
            assert listed(piece.in_file) == own[own >= 0].tolist()
            check_places(piece, own)


def check_places(piece: ParameterPiece, own: np.ndarray[Any, Any]) -> None:
    """Every cut of the elements into two is a cut of the span into two, each with its own elements."""
    for cut in range(piece.numel + 1):
        first, last = piece.place(0, cut), piece.place(cut, piece.numel)
        if 0 < cut < piece.numel:
            assert (first[0], first[1], last[1]) == (5, last[0], 5 + len(own))
            assert int((own[: first[1] - 5] >= 0).sum()) == cut


@pytest.mark.parametrize("shards", [1, 3])
def test_a_million_runs_take_as_many_steps_of_python_as_ten(shards: int) -> None:
    steps = [steps_of(rows, shards) for rows in (10, 1_000_000)]
    assert steps[1] <= steps[0] + 50
    assert steps[1] < 3000


def steps_of(rows: int, shards: int) -> int:
    """Lines of Python for all that a save and a load do with a part of ``rows`` runs."""
    placement = Placement("p", (rows, 6), 1, 1, 1, 1, 2)
    whole = np.arange(rows * 6, dtype=np.float32)
    numel = placement.local_numel
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        pieces = [
            piece_of(
                UNIT,
                0,
                range(i * numel // shards, (i + 1) * numel // shards),
                -(i * numel // shards),
                placement,
                0,
                True,
            )
            for i in range(shards)
        ]
        back = np.zeros_like(whole)
        for piece in pieces:
            runs = EvenRuns.of([piece.in_file]).within(range(1, rows * 6 - 1))
            values = np.empty(runs.numel, dtype=np.float32)
            runs.gather(whole, 0, values)
            runs.scatter(values, back, 0)
    finally:
        sys.settrace(None)
    expected = whole.reshape(rows, 6).copy()
    expected[:, :3] = 0
    expected[-1, -1] = 0  # not in the window
    assert np.array_equal(back.reshape(rows, 6), expected)
    return lines
