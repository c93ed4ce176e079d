"""Many ranks, more than there are elements, and numbers of them at which MPI-IO has hung (ompi#7109, ompi#7809)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import BUFFERS, MASTER
from tests.checkpoint.programs import state_digests
from tests.checkpoint.sizes_program import MODELS, WRITERS
from tests.helpers.mpirun import run_ranks

PROGRAM = ("-m", "tests.checkpoint.sizes_program")
TIMEOUT_S = 200.0


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    ("mpi_io", "sizes"),
    [("^ompio", [16, 8, 7, 1, 16]), ("ompio", [7, 5, 7])],
    ids=["romio", "ompio"],
)
def test_from_many_ranks_to_few_and_back(tmp_path: Path, mpi_io: str, sizes: list[int]) -> None:
    arguments = [*PROGRAM, "values", str(tmp_path), *map(str, sizes[1:])]
    done = run_ranks(sizes[0], arguments, TIMEOUT_S, env={"OMPI_MCA_io": mpi_io})
    assert done.returncode == 0, done
    for model in MODELS:
        found = {}
        for size in set(sizes):
            for writer in WRITERS:
                path = tmp_path / str(size) / model / writer / "step-000000000"
                assert verify(path).verdict is Verdict.SOUND
                assert read_manifest(path).world_size == size
                found[path] = state_digests(path)
        first, *others = found.values()
        assert set(first) == {MASTER, BUFFERS}
        assert all(other == first for other in others), found


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_training_passed_on_among_up_to_8_ranks_keeps_every_bit(tmp_path: Path) -> None:
    legs = ["4-3", "8-3", "5-1", "8-2", "3-0", "8-0", "2-2", "1-3"]
    done = run_ranks(8, [*PROGRAM, "training", str(tmp_path), *legs], TIMEOUT_S)
    assert done.returncode == 0, done
    first, *others = (state_digests(tmp_path / leg / "step-000000003") for leg in legs)
    assert set(first) == {MASTER, BUFFERS, "/state/exp_avg", "/state/exp_avg_sq"}
    assert all(other == first for other in others), others
