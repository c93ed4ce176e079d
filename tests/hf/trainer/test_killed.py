"""A trainer that is killed between any two files of a save goes on, at another number of ranks and another stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cases import EVERYTHING
from tests.helpers.mpirun import run_alone, run_ranks

PROGRAM = ["-m", "tests.hf.trainer.kill_program"]
LAST = 40  # changes of the disk in a save, at most; the program says where there were fewer


@pytest.mark.slow
@pytest.mark.limit(900)
def test_killed_anywhere_in_a_save_goes_on_elsewhere(tmp_path: Path) -> None:
    """Killed on one rank at stage 3, and on two at stage 2; goes on on two or three at stage 1."""
    changes = range(LAST) if EVERYTHING else (1, 6, 11, 16, 21)
    killed = run_alone([*PROGRAM, "kill", str(tmp_path), *map(str, changes)], 600)
    assert killed.returncode == 0, killed
    told = [line.split() for line in killed.stdout.splitlines() if line[:1].isdigit()]
    ended = {int(change): int(code) for change, code in told}
    assert set(ended) == set(changes)
    assert sum(code == -9 for code in ended.values()) >= 4, killed
    assert set(ended.values()) <= {-9, 3}, killed
    if EVERYTHING:
        assert ended[LAST - 1] == 3, "a save has more changes than were tried"
        for change in (2, 9, 14):
            run_ranks(2, [*PROGRAM, "train", str(tmp_path), str(change + LAST)], 300)
    resumed = run_ranks(3 if EVERYTHING else 2, [*PROGRAM, "resume", str(tmp_path)], 600)
    assert resumed.returncode == 0, resumed
    lines = [line.split() for line in resumed.stdout.splitlines() if line[:1].isdigit()]
    assert len(lines) >= len(ended), resumed
    for _, weights, losses, left in lines:
        assert float(weights) < 1e-6, resumed
        assert float(losses) < 1e-6, resumed
        assert left == "step-000000008", resumed
