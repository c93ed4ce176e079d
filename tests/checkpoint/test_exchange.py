"""From any cut of a dataset over ranks to its slabs and back: exchanges, runs at even distances, elements on a tier."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero.accelerator import HostAccelerator
from hpczero.checkpoint import exchange as module
from hpczero.checkpoint import held
from hpczero.checkpoint.disk.format import Dataset
from hpczero.checkpoint.exchange import DatasetExchange, EvenRuns, StridedRange
from hpczero.checkpoint.held import HeldPieces, ParameterPiece, StateHome, piece_of
from hpczero.job.watchdog import Watchdog
from hpczero.plan.offloaded import cut
from hpczero.plan.placement import Placement
from hpczero.tier import HostTier
from hpczero.zero.units.away_shard import AwayShard, UnitStore
from tests.helpers.world import World


def dealt(numel: int, size: int, seed: int) -> list[list[tuple[int, int]]]:
    """Runs of each rank: random places, dealt at random; some ranks may get none."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, min(numel, 40) + 1))
    inner = random.choice(numel, count, replace=False).tolist() if numel else []
    edges = [0, *sorted(inner), numel]
    runs: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for start, stop in pairwise(edges):
        if stop > start:
            runs[int(random.integers(size))].append((start, stop))
    return runs


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["<f4", "|u1"])
@pytest.mark.parametrize("numel", [0, 1, 13, 997, 4096])
def test_what_ranks_hold_becomes_the_dataset_and_comes_back(
    world: World, numel: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(world.rank, 0.0)
    for seed in range(6):
        slab = (1, 7, 64, 5000)[seed % 4]
        monkeypatch.setattr(module, "ROUND_NBYTES", (1, 300, 10_000)[seed % 3])
        runs = dealt(numel, world.size, seed)[world.rank]
        whole = (np.arange(numel) * 37 % 251).astype(dtype)
        mine = np.concatenate([whole[a:b] for a, b in runs] or [whole[:0]])
        dataset = Dataset("/x", dtype, numel, slab)
        exchange = DatasetExchange(world.comm, watchdog, runs)
        world.check(exchange.numel == len(mine))
        back = torch.zeros(len(mine), dtype=torch.from_numpy(whole).dtype)
        for windows in exchange.rounds(dataset):
            window = windows[world.rank]
            places = exchange.places(windows)
            slabs = exchange.to_slabs([torch.from_numpy(mine)[p] for p in places], windows)
            world.check(np.array_equal(slabs.numpy(), whole[window.start : window.stop]))
            exchange.from_slabs(slabs, [back[p] for p in places], windows)
        world.check(np.array_equal(back.numpy(), mine), f"seed {seed}")


@pytest.mark.mpi
def test_no_rank_gathers_more_than_a_round(world: World) -> None:
    dataset = Dataset.of("/x", "<f4", 100 * 2**20)
    exchange = DatasetExchange(world.comm, Watchdog(world.rank, 0.0), [])
    most = max(4 * len(window) for windows in exchange.rounds(dataset) for window in windows)
    assert most <= module.ROUND_NBYTES


# --- runs at even distances, against lists of single elements


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
    strips, grain, grains = (draw(st.integers(1, most)) for most in (3, 2, 4))
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
    for at in range(piece.numel + 1):
        first, last = piece.place(0, at), piece.place(at, piece.numel)
        if 0 < at < piece.numel:
            assert (first[0], first[1], last[1]) == (5, last[0], 5 + len(own))
            assert int((own[: first[1] - 5] >= 0).sum()) == at


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

    edges = [i * numel // shards for i in range(shards + 1)]
    back = np.zeros_like(whole)
    sys.settrace(count)
    try:
        for begin, end in pairwise(edges):
            piece = piece_of(UNIT, 0, range(begin, end), -begin, placement, 0, True)
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


# --- elements on a tier, read and written slice by slice, against plain NumPy


PART = "momentum"
HOME = StateHome(PART, lambda piece: {PART: None})
WINDOW = 2**14  # bytes: windows of 4096 elements, one part each


@contextmanager
def shards(numels: list[int], padding: int) -> Iterator[list[AwayShard]]:
    """Of units with so many elements of this rank's, and padding behind them."""
    accelerator = HostAccelerator()
    with HostTier(blocks=4, block_nbytes=WINDOW, accelerator=accelerator) as tier:
        store = UnitStore(tier, blocks=4, window_nbytes=WINDOW, device=accelerator.device)
        layouts = [cut(n + padding, [range(n)], 4096) for n in numels]
        options: Any = {"store": store, "parts": [PART], "near": False}
        yield [AwayShard(f"u{i}", layout, **options) for i, layout in enumerate(layouts)]


def pieces_of(found: list[AwayShard], numels: list[int], seed: int) -> list[ParameterPiece]:
    """Every unit cut at random, and all pieces in any order, as parameters are in a file."""
    random = np.random.default_rng(seed)
    pieces: list[tuple[Any, int, int]] = []
    for shard, numel in zip(found, numels, strict=True):
        unit = SimpleNamespace(away=shard, owned_numel=numel)
        cuts = sorted({0, numel, *random.integers(0, numel, size=5).tolist()})
        pieces += [(unit, a, b - a) for a, b in pairwise(cuts)]
    order = random.permutation(len(pieces)) if seed % 2 else np.arange(len(pieces))
    made, start = [], 0
    for unit, begin, numel in (pieces[place] for place in order):
        made.append(ParameterPiece(start, unit, 0, begin, numel))
        start += numel
    return made


def turns(numel: int, cursors: int, step: int) -> Iterator[slice]:
    """Slices as ranks take turns: each goes through its share, a step at a time."""
    edges = np.linspace(0, numel, cursors + 1).astype(int)
    for at in range(0, max(np.diff(edges)), step):
        for begin, end in pairwise(edges):
            if begin + at < end:
                yield slice(int(begin + at), int(min(begin + at + step, end)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("open_nbytes", [0, 3 * WINDOW, 2**30])
def test_what_is_put_in_slices_comes_back_in_others(
    monkeypatch: pytest.MonkeyPatch, seed: int, open_nbytes: int
) -> None:
    monkeypatch.setattr(held, "OPEN_NBYTES", open_nbytes)
    numels = [9001, 1, 4096, 12_345]
    values = np.random.default_rng(seed).standard_normal(sum(numels)).astype(np.float32)
    cursors, step = [(1, 3000), (3, 777), (4, 100_000)][seed % 3]
    with shards(numels, padding=5000) as found:
        pieces = pieces_of(found, numels, seed)
        for factor in (1, -1):  # the second time over what is there
            into = HeldPieces(pieces, HOME)
            for part in turns(len(values), cursors, step):
                into[part] = torch.from_numpy(factor * values[part])
        for shard in found:
            shard.settle(PART)
        back = HeldPieces(pieces, HOME)
        for part in turns(len(values), cursors + 1, step + 13):
            assert np.array_equal(back[part].numpy(), -values[part]), part
        for unit_shard, numel in zip(found, numels, strict=True):
            whole = torch.full((numel + 5000,), 7.0)
            unit_shard.read(PART, whole)
            assert not whole[numel:].any(), "padding"


def test_each_window_moves_once_where_there_is_room_for_those_that_are_open() -> None:
    numels = [50_001, 70_001]
    with shards(numels, padding=3) as found:
        pieces = pieces_of(found, numels, seed=0)
        into = HeldPieces(pieces, HOME)
        for part in turns(sum(numels), 3, 1000):
            into[part] = torch.ones(part.stop - part.start)
        back = HeldPieces(pieces, HOME)
        for part in turns(sum(numels), 3, 1000):
            assert back[part].all()
        flow = found[0].store.tier.traffic.total
        nbytes = 4 * (sum(numels) + 2 * 3)
        assert (flow.read_nbytes, flow.written_nbytes) == (nbytes, nbytes)


def test_what_was_never_written_is_zero() -> None:
    with shards([10_000], padding=0) as found:
        back = HeldPieces(pieces_of(found, [10_000], seed=0), HOME)
        assert not back[slice(17, 9000)].any()
        assert found[0].store.tier.traffic.total.read_nbytes == 0
