"""Open MPI's folder of jobs stays while tests run: jobs that begin and end side by side take it from one another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.helpers.mpirun import run_alone, run_ranks
from tests.helpers.session_folder import kept_session_folder

LISTS = "import os; from mpi4py import MPI; print(*os.listdir(os.environ['TMPDIR']))"


@pytest.mark.tool
@pytest.mark.fresh
def test_no_job_removes_the_folder_and_it_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with kept_session_folder() as folder:
        marks = sorted(folder.rglob("*"))
        for run in (partial(run_ranks, 1), run_alone):
            done = run(["-c", LISTS], 30)
            assert done.returncode == 0, done
            assert done.stdout.split() == [folder.name], "a job has its folder here"
            assert sorted(folder.rglob("*")) == marks
    assert not list(tmp_path.iterdir())
