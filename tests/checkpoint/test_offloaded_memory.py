"""Saved, loaded, collected and imported in memory that does not grow with what rests on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.memory_program import MIB
from tests.helpers.mpirun import run_typed

LIMIT_S = 120
LAYERS = {1: 18, 2: 36}  # by ranks
# Slabs and elements of a round, windows of 8 MiB, and what the allocator keeps; measured: 97 and 117 MiB.
MOST_NBYTES = 140 * MIB
# A piece of a parameter, a window of 8 MiB; measured: 2 and 24 MiB. Whole values took 174 and 104 MiB.
MOST_IMPORT_NBYTES = 48 * MIB


@pytest.mark.limit(LIMIT_S + 10)
@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_holds_its_shard_whatever_is_done_with_it(tmp_path: Path, ranks: int) -> None:
    shard_nbytes = 3 * LAYERS[ranks] * 4 * MIB // ranks  # values and two states
    assert shard_nbytes > 1.5 * MOST_NBYTES
    args = ["-m", "tests.checkpoint.memory_program", str(tmp_path), str(LAYERS[ranks])]
    finished = run_typed(ranks, args, LIMIT_S)
    assert finished.returncode == 0, finished
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == ranks
    for peaks in map(json.loads, lines):
        assert set(peaks) == {"zeroify", "step", "save", "load", "weights", "import"}
        assert max(peaks.values()) < MOST_NBYTES, peaks
        assert peaks["import"] < MOST_IMPORT_NBYTES, peaks
