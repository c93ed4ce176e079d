"""A run that goes on from a checkpoint draws no initial weights; one that begins draws each once."""

from __future__ import annotations

import re
from pathlib import Path

from hpczero.models import PRESETS
from tests.helpers.mpirun import Finished, run_typed
from tests.helpers.runs import options

RANKS = 2
# The training command, which says at its end how many elements of initial weights this rank has made.
PROGRAM = """
import atexit, sys
from hpczero.errors import run
from hpczero.models.initial import InitialWeights
from hpczero.train import main

drawn, fill_range = [], InitialWeights.fill_range

def counted(self, name, shape, start, values):
    drawn.append(len(values))
    fill_range(self, name, shape, start, values)

InitialWeights.fill_range = counted
atexit.register(lambda: sys.stderr.write(f"drawn {sum(drawn)} in {len(drawn)} calls\\n"))
run(main)
"""


def train(program: Path, folder: Path, **changes: object) -> tuple[Finished, list[int]]:
    command = [str(program), *options(folder, checkpoint__every=1, **changes)[2:]]
    job = run_typed(RANKS, command, timeout=90)
    assert job.returncode == 0, job
    found = [int(numel) for numel in re.findall(r"drawn (\d+) in", job.stderr)]
    assert len(found) == RANKS, job
    return job, found


def test_a_run_that_goes_on_draws_nothing(tmp_path: Path) -> None:
    program = tmp_path / "counting.py"
    program.write_text(PROGRAM)
    _, drawn = train(program, tmp_path, train__steps=1)
    blocks = PRESETS["gpt-micro"].layers * 12 * PRESETS["gpt-micro"].hidden ** 2
    assert sum(drawn) > blocks, "more than the weight matrices of the blocks"
    assert max(drawn) < 0.6 * sum(drawn), "each rank about its half"
    job, drawn = train(program, tmp_path, train__steps=2)
    assert "going on from" in job.stdout + job.stderr
    assert drawn == [0] * RANKS
