"""The command that checks a GPU, on its twin: the same code, small, on the host."""

from __future__ import annotations

import sys

import pytest

from hpczero.errors import ConfigError
from scaling.gpu import Options, goals, job, report

LAUNCH = ["mpirun", "--oversubscribe", "-n"]


@pytest.mark.limit(180)
@pytest.mark.parametrize(
    ("check", "ranks", "columns"),
    [
        ("kernels", 1, {"kernel", "of_copy"}),
        ("parity", 2, {"stage", "way", "bits_equal"}),
        ("overlap", 2, {"way", "exposed"}),
    ],
)
def test_checks_run_on_the_twin(check: str, ranks: int, columns: set[str]) -> None:
    rows, problem = job([*LAUNCH, str(ranks)], check, 150.0, twin=True)
    assert not problem
    assert rows
    assert all(columns <= set(row) for row in rows)
    assert all(row.get("bits_equal", True) and row.get("right", True) for row in rows)


@pytest.mark.limit(60)
def test_a_check_that_crashes_or_hangs_costs_its_own_figures_only() -> None:
    rows, problem = job(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], "x", 30.0, twin=True
    )
    assert not rows
    assert problem.startswith("exit code -11")
    rows, problem = job([sys.executable, "-c", "import time; time.sleep(60)"], "x", 0.5, twin=True)
    assert problem.startswith("not done after")


def test_goals_of_a_run_are_met_or_missed_by_its_rows() -> None:
    rows = [
        {"kind": "run", "twin": False},
        {"kind": "kernels", "kernel": "sum of 2 bfloat16", "of_copy": 0.9, "bits_equal": True},
        {"kind": "speed", "model": "124M", "way": "hpczero", "of_plain": 0.5},
        {"kind": "failure", "check": "fits", "ranks": 4, "said": "no time was left for it"},
    ]
    said = dict(goals(rows))
    assert said["kernels at least 0.85 of the copy's rate"] == "0.9, met"
    assert said["124M: tokens/s at least 0.97 of plain torch"] == "0.5, missed"
    assert "fits on 4 rank(s): no time was left for it" in report(rows)


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected some of facts kernels"):
        Options(checks=("kernel",))
    with pytest.raises(ConfigError, match="--launch"):
        Options(launch="srun")
