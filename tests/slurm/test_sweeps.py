"""Scaling sweeps as jobs of a real SLURM: submitted by the scripts, collected by the last job, reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.mpirun import run_command
from tests.slurm.jobs import Submitter

pytestmark = pytest.mark.machine


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_a_sweep_is_submitted_collected_and_reported(
    submit: Submitter, tmp_path: Path, kind: str
) -> None:
    study = tmp_path / "study"
    words = f"--models tiny --batches 4 --steps 5 --warm_up 1 --folder {study}"
    done = submit.script(
        f"{kind}_scaling.sh",
        *words.split(),
        RANKS="1 2",
        LOGS=os.fspath(tmp_path),
        SBATCH_OPTIONS="--exclusive=user --mem=0",
    )
    assert done.returncode == 0, done
    numbers = [
        line.split()[line.split().index("job") + 1].rstrip(":")
        for line in (done.stdout + done.stderr).splitlines()
        if " job " in f" {line} " and ":" in line
    ]
    assert len(numbers) == 3, done
    ends = ("COMPLETED", "FAILED", "CANCELLED")
    submit.cluster.wait_for_state(numbers[-1], *ends, limit_s=150.0)
    logs = "\n".join(path.read_text() for path in sorted((study / "logs").glob("*")))
    (rows,) = study.glob("*.jsonl") or pytest.fail(logs)
    points = [json.loads(line) for line in rows.read_text().splitlines()]
    ranks = [row["point"]["ranks"] for row in points if row["kind"] == "point"]
    assert sorted(ranks) == [1, 2], logs
    report = run_command([sys.executable, "-m", "scaling.report", rows], timeout=60)
    assert report.returncode == 0, report
    assert "emulated" in report.stdout.lower() or "not scaling" in report.stdout.lower(), report
