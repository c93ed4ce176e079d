"""What tests ask of the two runs of ``conftest.py``: places in them, and the commands that look at them.

Must not know: what any test looks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpczero.checkpoint import __main__ as command
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MASTER
from hpczero.data import TokenFile, Tokenizer
from tests.checkpoint.damage import flip_in
from tests.helpers.mpirun import Finished, run_typed

PROMPT = "def "
NUM_TOKENS = 24
SAMPLE = ["-m", "hpczero.sample"]
CHOICES = ["--prompt", PROMPT, "--tokens", str(NUM_TOKENS)]


def sample(path: Path, *args: object, ranks: int = 1) -> Finished:
    return run_typed(ranks, [*SAMPLE, path, *CHOICES, *map(str, args)], timeout=100)


def call(*args: object) -> int:
    """The command, in this process."""
    before, sys.argv = sys.argv, ["checkpoint", *map(str, args)]
    try:
        return command.main()
    finally:
        sys.argv = before


def tokenizer_of(path: Path) -> Tokenizer:
    with TokenFile.open(path) as tokens:
        return tokens.tokenizer


def step_path(runs: Path, step: int, name: str = "r") -> Path:
    return runs / name / "checkpoints" / f"step-{step:09d}"


def damage(checkpoint: Path) -> None:
    """Change one bit of a parameter."""
    master = read_manifest(checkpoint).dataset(MASTER)
    assert master is not None
    flip_in(checkpoint, master, 5)


def hollow_out(checkpoint: Path) -> None:
    """Leave the folder alone, with nothing in it."""
    for file in checkpoint.iterdir():
        file.unlink()
