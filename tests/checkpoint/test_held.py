"""Elements on a tier, read and written slice by slice as an exchange asks for them, against plain NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpczero.accelerator import HostAccelerator
from hpczero.checkpoint import held as module
from hpczero.checkpoint.held import HeldPieces, ParameterPiece, StateHome
from hpczero.plan.offloaded import cut
from hpczero.tier import HostTier
from hpczero.zero.units.away_shard import AwayShard, UnitStore

PART = "momentum"
WINDOW = 2**14  # bytes: windows of 4096 elements, one part each


@contextmanager
def shards(numels: list[int], padding: int) -> Iterator[list[AwayShard]]:
    """Of units with so many elements of this rank's, and padding behind them."""
    accelerator = HostAccelerator()
    with HostTier(blocks=4, block_nbytes=WINDOW, accelerator=accelerator) as tier:
        store = UnitStore(tier, blocks=4, window_nbytes=WINDOW, device=accelerator.device)
        yield [
            AwayShard(
                f"u{i}", cut(n + padding, [range(n)], 4096), store=store, parts=[PART], near=False
            )
            for i, n in enumerate(numels)
        ]


def pieces_of(found: list[AwayShard], numels: list[int], seed: int) -> list[ParameterPiece]:
    """Every unit cut at random, and all pieces in any order, as parameters are in a file."""
    random = np.random.default_rng(seed)
    pieces: list[tuple[Any, int, int]] = []
    for shard, numel in zip(found, numels, strict=True):
        unit = SimpleNamespace(away=shard, owned_numel=numel)
        cuts = sorted({0, numel, *random.integers(0, numel, size=5).tolist()})
        pieces += [(unit, a, b - a) for a, b in itertools.pairwise(cuts)]
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
        for begin, end in itertools.pairwise(edges):
            if begin + at < end:
                yield slice(int(begin + at), int(min(begin + at + step, end)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("open_nbytes", [0, 3 * WINDOW, 2**30])
def test_what_is_put_in_slices_comes_back_in_others(
    monkeypatch: pytest.MonkeyPatch, seed: int, open_nbytes: int
) -> None:
    monkeypatch.setattr(module, "OPEN_NBYTES", open_nbytes)
    numels = [9001, 1, 4096, 12_345]
    values = np.random.default_rng(seed).standard_normal(sum(numels)).astype(np.float32)
    cursors, step = [(1, 3000), (3, 777), (4, 100_000)][seed % 3]
    with shards(numels, padding=5000) as found:
        pieces = pieces_of(found, numels, seed)
        for factor in (1, -1):  # the second time over what is there
            into = HeldPieces(pieces, StateHome(PART, lambda piece: {PART: None}))
            for part in turns(len(values), cursors, step):
                into[part] = torch.from_numpy(factor * values[part])
        for shard in found:
            shard.settle(PART)
        back = HeldPieces(pieces, StateHome(PART, lambda piece: {PART: None}))
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
        into = HeldPieces(pieces, StateHome(PART, lambda piece: {PART: None}))
        for part in turns(sum(numels), 3, 1000):
            into[part] = torch.ones(part.stop - part.start)
        back = HeldPieces(pieces, StateHome(PART, lambda piece: {PART: None}))
        for part in turns(sum(numels), 3, 1000):
            assert back[part].all()
        flow = found[0].store.tier.traffic.total
        nbytes = 4 * (sum(numels) + 2 * 3)
        assert (flow.read_nbytes, flow.written_nbytes) == (nbytes, nbytes)


def test_what_was_never_written_is_zero() -> None:
    with shards([10_000], padding=0) as found:
        back = HeldPieces(
            pieces_of(found, [10_000], seed=0), StateHome(PART, lambda piece: {PART: None})
        )
        assert not back[slice(17, 9000)].any()
        assert found[0].store.tier.traffic.total.read_nbytes == 0
