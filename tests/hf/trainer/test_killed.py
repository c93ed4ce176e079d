"""A trainer that is killed between any two files of a save goes on, at another number of ranks and another stage."""

from __future__ import annotations

from collections import defaultdict
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


# --- whole weights saved over an older save: a folder holds one of the two, or nobody loads it


WEIGHTS = ["-m", "tests.hf.trainer.kill_weights_program"]
KINDS = {"old", "new", "refused"}


def told(words: list[str]) -> dict[str, list[tuple[int, int, str, str]]]:
    """By case: change, how it ended, what others load, what hpczero does."""
    found = run_alone([*WEIGHTS, *words], 600)
    assert found.returncode == 0, found
    cases = defaultdict(list)
    for line in found.stdout.splitlines():
        if line.startswith("CASE "):
            _, case, change, ended, theirs, ours = line.split(" ", 5)
            cases[case].append((int(change), int(ended), theirs, ours))
    return cases


@pytest.mark.slow
@pytest.mark.limit(600)
def test_files_of_two_saves_are_never_loaded_together(tmp_path: Path) -> None:
    """A new save takes the place of an older one, of as many files, more or fewer; killed at every change."""
    cases = told(["files", str(tmp_path)])
    assert len(cases) == 6
    for case, lines in cases.items():
        assert lines[0][2] == "old", (case, lines)
        assert lines[-1][1:3] == (3, "new"), (case, lines)
        assert len(lines) > 5, (case, lines)
        for change, ended, theirs, ours in lines:
            assert theirs in KINDS, (case, change, theirs)
            assert ours in {theirs, "-"}, (case, change, ours)
            assert ended in (-9, 3), (case, change, ended)


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("what", ["trainer", "adapter"])
def test_killed_save_model_leaves_one_save_or_none(tmp_path: Path, what: str) -> None:
    """From the first change of the disk to the last, on one rank."""
    changes = range(100) if EVERYTHING else (1, 9, 14, 18)
    (lines,) = told([what, str(tmp_path), *map(str, changes)]).values()
    assert len(lines) == len(changes)
    assert sum(ended == -9 for _, ended, _, _ in lines) >= 3, lines
    for change, ended, theirs, ours in lines:
        assert ended in (-9, 3), (change, ended)
        assert theirs in KINDS, (change, theirs)
        assert ours in {theirs, "-"}, (change, ours)
    if EVERYTHING:
        assert lines[0][2] == "old"
        assert lines[-1][1:3] == (3, "new"), "a save has more changes than were tried"
