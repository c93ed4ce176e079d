"""The examples run as their users run them, and learn something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from examples.adapters import TARGETS
from tests.helpers.cases import EVERYTHING
from tests.helpers.mpirun import ROOT, Finished, run_command, run_ranks
from tests.helpers.transcripts import commands_of

EXAMPLES = ROOT / "examples"
LIMIT_S = 90.0  # they take a few seconds on an idle machine
# Of the list, run here with the same words.
COMMANDS = {
    f"mpirun -n {ranks} .venv/bin/python examples/{name}": (ranks, name)
    for name, ranks in {
        "own_loop.py": 2,
        "convnet.py": 2,
        "resume_later.py": 2,
        "several_tasks.py": 2,
        "split_your_own.py": 4,
    }.items()
}
FELL = re.compile(r"^loss fell from ([\d.]+) to ([\d.]+)", re.MULTILINE)


def run_example(ranks: int, name: str, *args: str) -> Finished:
    finished = run_ranks(ranks, [EXAMPLES / name, *args], timeout=LIMIT_S).ended()
    assert "Error" not in finished.stderr, finished
    return finished


def losses(finished: Finished) -> tuple[float, float]:
    """First and last loss; exactly one rank tells them."""
    found = FELL.findall(finished.stdout)
    assert len(found) == 1, finished
    return float(found[0][0]), float(found[0][1])


def test_every_example_is_in_the_list_and_is_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    factories = (target.factory.partition(":")[0] for target in TARGETS.values())
    models = {f"{name.removeprefix('examples.')}.py" for name in factories}
    assert names - models | {"convnet.py"} == {
        "own_loop.py",
        "convnet.py",
        "resume_later.py",
        "larger_than_memory.py",
        "several_tasks.py",
        "split_your_own.py",
        "adapters.py",
    }
    listed = re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(names)
    assert COMMANDS.keys() <= {shown.text for shown in commands_of(EXAMPLES / "README.md")}


@pytest.mark.limit(LIMIT_S + 30)
def test_own_loop_learns() -> None:
    first, last = losses(run_example(2, "own_loop.py"))
    assert last < 0.4 * first


@pytest.mark.limit(LIMIT_S + 30)
@pytest.mark.slow
def test_every_task_learns(tmp_path: Path) -> None:
    finished = run_example(2, "several_tasks.py", "--folder", str(tmp_path))
    fell = r"^(\w+): (\d+) micro-batches, loss fell from ([\d.]+) to ([\d.]+)"
    found = re.findall(fell, finished.stdout, re.MULTILINE)
    assert [(task, int(count)) for task, count, *_ in found] == [
        ("waves", 150),
        ("steps", 100),
        ("lines", 50),
    ]
    assert all(float(last) < 0.4 * float(first) for *_, first, last in found), found
    assert {path.name for path in tmp_path.iterdir()} == {task for task, *_ in found}


@pytest.mark.limit(2 * LIMIT_S)
@pytest.mark.slow
def test_a_model_of_ones_own_learns_alike_in_any_layout() -> None:
    alone, *divided = (
        losses(run_example(ranks, "split_your_own.py"))
        for ranks in ((1, 2, 4) if EVERYTHING else (1, 4))
    )
    assert alone[1] < 0.4 * alone[0]
    for found in divided:  # one data parallel rank each: the same batches
        assert found == pytest.approx(alone, abs=2e-3)


@pytest.mark.limit(LIMIT_S + 30)
@pytest.mark.slow
def test_convnet_learns_and_names_new_images() -> None:
    finished = run_example(2, "convnet.py")
    first, last = losses(finished)
    assert last < 0.2 * first
    right = re.search(r"(\d+)% of new images right", finished.stdout)
    assert right is not None, finished
    assert int(right[1]) > 70  # guessing names 25 %


@pytest.mark.limit(2 * LIMIT_S + 30)
def test_training_goes_on_later_with_the_same_weights_on_other_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    began, left = losses(run_example(2, "resume_later.py", "--folder", str(folder)))
    assert left < 0.5 * began
    later = run_example(3, "resume_later.py", "--folder", str(folder))
    assert later.stdout.startswith("step 40, 3 rank(s)"), later
    resumed, last = losses(later)
    assert resumed == left  # every bit of the loss, hence of the weights
    assert last < resumed
    left_there = sorted(path.name for path in folder.iterdir())
    assert left_there == ["LATEST", "step-000000040", "step-000000080"]


@pytest.mark.limit(2 * LIMIT_S + 30)
def test_a_model_on_disk_trains_with_the_bits_of_one_in_memory(tmp_path: Path) -> None:
    options = ["--preset", "gpt-micro", "--context", "32", "--window", "1"]
    resident = run_example(2, "larger_than_memory.py", *options, "--resident")
    away = run_example(2, "larger_than_memory.py", *options, "--folder", str(tmp_path))
    kept, found = (
        re.findall(r"loss [\d.]+ \((\S+)\)  gradient norm ([\d.]+)", finished.stdout)
        for finished in (resident, away)
    )
    assert len(kept) == 3
    assert found == kept
    assert "wrote" in away.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.limit(2 * LIMIT_S + 30)
@pytest.mark.slow
def test_an_adapter_reaches_its_target_beside_plain_torch() -> None:
    command = [sys.executable, str(EXAMPLES / "adapters.py"), "--only", "graphsage"]
    finished = run_command(command, 2 * LIMIT_S).ended()
    line = re.search(r"^graphsage +([\d.]+) \( *([\d.]+)\)", finished.stdout, re.MULTILINE)
    assert line is not None, finished
    assert float(line[1]) == pytest.approx(float(line[2]), abs=0.02)
    assert float(line[1]) > 0.9  # guessing names 25 %
