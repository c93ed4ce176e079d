"""From any cut of a dataset over ranks to its slabs and back, against plain NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hpczero.checkpoint import exchange as module
from hpczero.checkpoint.disk.format import Dataset
from hpczero.checkpoint.exchange import DatasetExchange
from hpczero.job.watchdog import Watchdog
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]


def cut(numel: int, size: int, seed: int) -> list[list[tuple[int, int]]]:
    """Runs of each rank: random places, dealt at random; some ranks may get none."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, min(numel, 40) + 1))
    edges = (
        [0, *sorted(random.choice(numel, count, replace=False).tolist()), numel]
        if numel
        else [0, 0]
    )
    runs: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for start, stop in pairwise(edges):
        if stop > start:
            runs[int(random.integers(size))].append((start, stop))
    return runs


@pytest.mark.parametrize("dtype", ["<f4", "|u1"])
@pytest.mark.parametrize("numel", [0, 1, 13, 997, 4096])
def test_what_ranks_hold_becomes_the_dataset_and_comes_back(
    comm: MPI.Intracomm, numel: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(comm.rank, 0.0)
    for seed in range(6):
        slab = (1, 7, 64, 5000)[seed % 4]
        monkeypatch.setattr(module, "ROUND_NBYTES", (1, 300, 10_000)[seed % 3])
        runs = cut(numel, comm.size, seed)[comm.rank]
        whole = (np.arange(numel) * 37 % 251).astype(dtype)
        mine = np.concatenate([whole[a:b] for a, b in runs] or [whole[:0]])
        dataset = Dataset("/x", dtype, numel, slab)
        exchange = DatasetExchange(comm, watchdog, runs)
        parallel_assert(comm, exchange.numel == len(mine))
        back = torch.zeros(len(mine), dtype=torch.from_numpy(whole).dtype)
        for windows in exchange.rounds(dataset):
            window = windows[comm.rank]
            places = exchange.places(windows)
            slabs = exchange.to_slabs([torch.from_numpy(mine)[p] for p in places], windows)
            parallel_assert(comm, np.array_equal(slabs.numpy(), whole[window.start : window.stop]))
            exchange.from_slabs(slabs, [back[p] for p in places], windows)
        parallel_assert(comm, np.array_equal(back.numpy(), mine), f"seed {seed}")


def test_no_rank_gathers_more_than_a_round(comm: MPI.Intracomm) -> None:
    dataset = Dataset.of("/x", "<f4", 100 * 2**20)
    exchange = DatasetExchange(comm, Watchdog(comm.rank, 0.0), [])
    most = max(4 * len(window) for windows in exchange.rounds(dataset) for window in windows)
    assert most <= module.ROUND_NBYTES
