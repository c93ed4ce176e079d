"""A mistake that rank 0 tells before MPI has started, under a launcher that lets the other ranks wait for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import OPTIONS, words_of

pytestmark = pytest.mark.machine


@pytest.mark.limit(120)
def test_step_without_kill_on_bad_exit_ends_with_78_and_tells_the_mistake_once(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    step = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    wrong = {**OPTIONS, "run.folder": tmp_path / "runs", "data.path": tmp_path / "missing"}
    command = [*step, sys.executable, "-m", "hpczero.train", *words_of(wrong)]
    done = slurm.run(command, cwd=tmp_path, check=False, timeout=90, env={"HPCZERO_TIMEOUT": "60"})
    errors = [line for line in done.stderr.splitlines() if "[rank " in line]
    assert len(errors) == 1, done
    assert f"{tmp_path / 'missing'}: no such file or folder" in errors[0]
    assert "Timeout" not in done.stderr
    assert done.returncode == 78, done
    assert not (tmp_path / "runs").exists()
