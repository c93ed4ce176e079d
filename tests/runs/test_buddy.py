"""A run that loses a node goes on from copies in memory of the others, bit for bit, and opens no checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.killed import Job

STEPS = 12

# The training command, which notes each file of a checkpoint on the shared disk that it opens, and may die.
PROGRAM = """
import os, signal, sys
opened, dies_after, buddies = open(sys.argv.pop(1), "a"), int(sys.argv.pop(1)), sys.argv.pop(1)
def note(event, args):
    if event == "open":
        name = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else ""
        if name.endswith(("state.h5", "manifest.json")) and not name.startswith(buddies):
            opened.write(name + "\\n")
            opened.flush()
sys.addaudithook(note)
from hpczero.errors import run
from hpczero.run.checkpoints import RunCheckpoints
after = RunCheckpoints.after_step
def after_step(self, done, *args, **more):
    after(self, done, *args, **more)
    if done == dies_after:
        os.kill(os.getpid(), signal.SIGKILL)
RunCheckpoints.after_step = after_step
from hpczero.train import main
run(main)
"""

WORDS = {
    "--run.exact": "require",
    "--model.preset": "gpt-nano",
    "--model.layers": "2",
    "--model.hidden": "64",
    "--model.heads": "4",
    "--model.context": "32",
    "--train.global_batch": "8",
    "--train.steps": str(STEPS),
    "--evaluation.batches": "0",
    "--log.plot": "false",
    "--log.tensorboard": "false",
}


class Series:
    """Starts of one run."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run, self.buddies = folder / "runs" / "mine", folder / "memory"
        self._folder, self._words, self._starts = folder, words, 0
        self.buddies.mkdir(parents=True)

    def start(self, ranks: int, nodes: str, *words: str, dies_after: int = -1) -> tuple[int, str]:
        """Exit code, and what it said; ``opened`` has the files."""
        self._starts += 1
        self.opened = self._folder / f"opened-{self._starts}"
        program = [sys.executable, "-c", PROGRAM, self.opened, dies_after, self.buddies]
        given = [word for option in WORDS.items() for word in option]
        given += ["--run.name", "mine", "--run.folder", str(self.run.parent)]
        given += ["--checkpoint.buddy_folder", str(self.buddies), "--parallel.nodes", nodes]
        with Job.launch(
            self._folder / f"log-{self._starts}",
            [str(word) for word in [*program[1:], *given, *self._words, *words]],
            ranks=ranks,
        ) as job:
            return job.wait(), job.said

    @property
    def nodes(self) -> list[Path]:
        """What each node holds."""
        return sorted(self.buddies.glob("hpczero-*/*/node-*"))

    def losses(self) -> list[float]:
        return losses(self.run)


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def digest(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    series = Series(tmp_path_factory.mktemp("undisturbed"))
    code, said = series.start(1, "1x1")
    assert code == 0, said
    return series.run


def check_equal(series: Series, undisturbed: Path) -> None:
    assert series.losses() == losses(undisturbed)
    assert digest(series.run) == digest(undisturbed)
    assert not list(series.buddies.glob("hpczero-*/*"))  # nothing is left in memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        ((4, "2x2"), ["node-1"], (2, "1x2")),
        ((4, "2x2"), ["node-0"], (2, "1x2")),
        ((3, "3x1"), ["node-1"], (2, "2x1")),
        ((3, "3x1"), ["node-0"], (3, "3x1")),
    ],
    ids=["the last node", "the first node", "one of three", "a new node takes its place"],
)
def test_goes_on_after_a_lost_node(
    tmp_path: Path,
    undisturbed: Path,
    before: tuple[int, str],
    lost: Sequence[str],
    after: tuple[int, str],
) -> None:
    series = Series(tmp_path, "--checkpoint.buddy", "2", "--checkpoint.every", "100")
    code, said = series.start(*before, dies_after=7)
    assert code != 0, said
    steps = [path.name[:14] for node in series.nodes for path in node.iterdir()]
    assert steps == ["step-000000006"] * len(series.nodes), said
    for node in series.nodes:
        if node.name in lost:
            shutil.rmtree(node)
    shutil.rmtree(series.run / "checkpoints")
    code, said = series.start(*after)
    assert code == 0, said
    ranks, _ = before
    assert "going on from the copies in memory of " in said, said
    assert f": step 6, made by {ranks} rank(s)" in said, said
    opened = series.opened.read_text().splitlines()
    assert all(f"step-{STEPS:09d}" in name for name in opened), opened  # which it writes at its end
    check_equal(series, undisturbed)


@pytest.mark.slow
def test_damaged_copies_are_refused_and_the_disk_is_taken(
    tmp_path: Path, undisturbed: Path
) -> None:
    series = Series(tmp_path, "--checkpoint.buddy", "2", "--checkpoint.every", "5")
    code, said = series.start(2, "2x1", dies_after=7)
    assert code != 0, said
    for node in series.nodes:
        for path in node.glob("*/state.h5"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    code, said = series.start(2, "2x1")
    assert code == 0, said
    assert "the copies in memory of step 6 are not used: " in said, said
    assert "do not have the digest they were written with" in said, said
    assert "step 5, saved by 2 rank(s)" in said, said
    check_equal(series, undisturbed)


@pytest.mark.slow
def test_damaged_copies_without_a_checkpoint_are_an_error_that_says_what_to_do(
    tmp_path: Path, undisturbed: Path
) -> None:
    series = Series(tmp_path, "--checkpoint.buddy", "2", "--checkpoint.every", "100")
    code, said = series.start(2, "2x1", dies_after=3)
    assert code != 0, said
    for node in series.nodes:
        for path in node.glob("*/state.h5"):
            path.write_bytes(bytes(path.stat().st_size))
    code, said = series.start(2, "2x1")
    assert code == 65, said
    assert "no checkpoint is on the disk" in said, said
    code, said = series.start(2, "2x1", "--run.overwrite", "true")
    assert code == 0, said
    check_equal(series, undisturbed)


@pytest.mark.slow
def test_copies_that_lack_slabs_are_refused(tmp_path: Path, undisturbed: Path) -> None:
    series = Series(tmp_path, "--checkpoint.buddy", "2", "--checkpoint.every", "5")
    code, said = series.start(3, "3x1", dies_after=7)
    assert code != 0, said
    for node in series.nodes[1:]:
        shutil.rmtree(node)
    code, said = series.start(2, "2x1")
    assert code == 0, said
    assert "nobody has what node(s) 1 wrote" in said, said
    assert "step 5, saved by 3 rank(s)" in said, said
    check_equal(series, undisturbed)


@pytest.mark.slow
def test_a_later_step_on_the_disk_goes_first_and_one_node_is_refused(
    tmp_path: Path, undisturbed: Path
) -> None:
    series = Series(tmp_path, "--checkpoint.buddy", "4", "--checkpoint.every", "5")
    code, said = series.start(1, "1x1")
    assert code == 78, said
    assert "checkpoint.buddy: got 4 on 1 node" in said, said
    assert "expected two nodes or more" in said, said
    code, said = series.start(2, "2x1", dies_after=7)
    assert code != 0, said
    code, said = series.start(2, "2x1")
    assert code == 0, said
    assert "the copies in memory are of step 4; step 5 is on the disk" in said, said
    check_equal(series, undisturbed)
