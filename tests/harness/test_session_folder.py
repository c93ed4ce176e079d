"""Open MPI's folder of jobs stays while tests run: jobs that begin and end side by side take it from one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mpirun import run_ranks
from tests.helpers.session_folder import kept_session_folder


@pytest.mark.tool
@pytest.mark.fresh
def test_no_job_removes_the_folder_and_it_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with kept_session_folder() as folder:
        (mark,) = folder.iterdir()
        done = run_ranks(1, ["-c", "import os; print(*os.listdir(os.environ['TMPDIR']))"], 30)
        assert done.returncode == 0, done
        assert done.stdout.split() == [folder.name], "a job has its folder here"
        assert list(folder.iterdir()) == [mark]
    assert not list(tmp_path.iterdir())
