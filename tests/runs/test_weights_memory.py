"""The final weights of a run are written unit by unit: no rank's memory grows with the model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_ranks
from tests.runs.weights_memory_program import BLOCK_NBYTES, LAYERS

PROGRAM = ROOT / "tests" / "runs" / "weights_memory_program.py"
# Every large block goes back to the kernel when it is freed: what is resident is what is held.
FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.fspath(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 1), (3, 2), (3, 3)])
def test_no_rank_needs_more_than_some_units_beside_its_shards(
    tmp_path: Path, stage: int, ranks: int
) -> None:
    finished = run_ranks(ranks, [PROGRAM, tmp_path, str(stage)], 120, env=FREED).ended()
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith("grew")]
    assert len(lines) == ranks, str(finished)
    written = 0
    for _, by_unit, _, nbytes, file_nbytes in lines:
        assert int(nbytes) > 0.9 * LAYERS * BLOCK_NBYTES
        # Some units, and what the heap keeps of them; both are the same for any number of layers.
        assert int(by_unit) < 14 * BLOCK_NBYTES < int(nbytes) / 6, str(finished)
        written = max(written, int(file_nbytes))
    whole = int(lines[0][3])
    assert max(int(at_once) for _, _, at_once, *_ in lines) > 0.9 * whole, (
        "the measure sees nothing"
    )
    assert written > whole
