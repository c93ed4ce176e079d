"""Three dimensions at once need 8 ranks: tensor, pipeline and data parallelism beside one process."""

from __future__ import annotations

import pytest

from tests.helpers.mpirun import run_ranks

LIMIT_S = 240.0  # 8 ranks on what cores there are


@pytest.mark.slow
def test_tensor_by_pipeline_by_data_trains_what_one_process_trains() -> None:
    done = run_ranks(8, ["-m", "tests.parallel.eight_ranks"], timeout=LIMIT_S)
    assert done.returncode == 0, str(done)
    assert {line[:7] for line in done.stdout.splitlines()} == {f"stage {n}" for n in range(4)}
