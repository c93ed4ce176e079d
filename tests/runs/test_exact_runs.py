"""Runs with --run.exact: other ranks at every start, replays, and hardware that computes wrongly."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpczero.run.results.metrics import read_metrics
from hpczero.run.starting import resume
from tests.helpers.killed import Job
from tests.helpers.mpirun import Finished, run_ranks, run_typed
from tests.helpers.runs import options, train

# A bit of the gradient of a block is wrong at times: of rank BAD, once in EVERY leaves, or in leaf AT of its own.
WRONG_HARDWARE = """
import os, sys
import torch
from hpczero.zero.units import gradients
bad, at, every = (int(sys.argv.pop(1)) for _ in range(3))
right, count = gradients.LocalGradient.complete, 0
def complete(local):
    global count
    from mpi4py import MPI
    whole = right(local)
    if MPI.COMM_WORLD.rank == bad and "blocks.1.mlp" in str(local._layout.slots):
        count += 1
        if count == at or (every and count % every == 0):
            whole.view(torch.int32)[100] ^= 1
    return whole
gradients.LocalGradient.complete = complete
from hpczero import train
from hpczero.errors import run
run(train.main)
"""
EXACT: dict[str, Any] = {
    "run__exact": "require",
    "train__global_batch": 6,
    "model__layers": 2,
    "model__hidden": 32,
    "model__heads": 2,
}


def results(folder: Path) -> tuple[list[tuple[float, float]], str]:
    """Losses and norms of all steps, and a digest of the weights."""
    found = [(each.loss, each.grad_norm) for each in read_metrics(folder / "r" / "metrics.jsonl")]
    weights = (folder / "r" / "model.safetensors").read_bytes()
    return found, hashlib.sha256(weights).hexdigest()


def trained(folder: Path, ranks: int, **changes: Any) -> Finished:
    return train(folder, ranks, **{**EXACT, **changes})


def trained_wrongly(
    folder: Path, ranks: int, *, bad: int, at: int = 0, every: int = 0, **changes: Any
) -> Finished:
    given = options(folder, **{**EXACT, **changes})[2:]
    words = ["-c", WRONG_HARDWARE, *map(str, (bad, at, every)), *given]
    return run_ranks(ranks, words, timeout=90)


def replayed(folder: Path, ranks: int, step: int) -> Finished:
    return run_typed(ranks, ["-m", "hpczero.replay", folder / "r", "--step", str(step)], 90)


def kill(job: Job) -> None:
    for pid in job.ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert job.process.wait(60) not in (0, 75), job.said


@pytest.mark.limit(240)
def test_killed_starts_on_other_ranks_end_with_the_bits_of_one_undisturbed_rank(
    tmp_path: Path,
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    changes = {"train__steps": 40, "checkpoint__every": 2}
    trained(alone, 1, **changes).ended()
    many.mkdir()
    for number, (ranks, until) in enumerate([(2, 8), (3, 18)]):
        given = options(many, **{**EXACT, **changes})[2:]
        with Job.start(tmp_path / f"log-{number}", given, ranks=ranks) as job:
            job.wait_for_step(many / "r" / "metrics.jsonl", until)
            kill(job)
    trained(many, 4, **changes).ended()
    assert results(many) == results(alone)


def test_a_replay_names_the_step_the_unit_and_the_leaf_of_one_wrong_bit(tmp_path: Path) -> None:
    given = {"train__steps": 6, "checkpoint__every": 2, "log__digest_every": 1}
    trained_wrongly(tmp_path, 2, bad=1, at=11, **given).ended()
    wrong = replayed(tmp_path, 1, 4)
    wrong.ended(1)
    # Of rank 1 of 2 the eleventh leaf is the second one of step 4, of 6: leaf 3.
    said = "differs first at step 4: the gradient of unit 'blocks.1' of leaf 3 (rank 1 on "
    assert said in wrong.stdout, wrong
    right = replayed(tmp_path, 3, 6)
    right.ended()
    assert "steps 5 to 6 are those of the run" in right.stdout, right


@pytest.mark.parametrize("ranks", [2, 3])
def test_leaves_that_two_ranks_compute_name_the_rank_that_is_wrong(
    tmp_path: Path, ranks: int
) -> None:
    given: dict[str, Any] = {"train__steps": 20, "check__leaves": "1/2"}
    found = trained_wrongly(tmp_path, ranks, bad=1, every=10, **given)
    found.ended(1)
    assert re.search(r"leaf \d+: rank 1 \(.*unit 'blocks.1' wrongly", found.stderr), found


def test_leaves_that_are_right_change_nothing(tmp_path: Path) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    trained(plain, 1, train__steps=4).ended()
    trained(checked, 2, train__steps=4, check__leaves="1/1", log__digest_every=2).ended()
    assert results(checked) == results(plain)


def test_other_threads_or_another_processor_are_told_and_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = {resume.COMPUTED_ON: "cpu AVX2, 1 thread(s), torch 2.13.0", "seed": 0}
    found: Any = SimpleNamespace(extra=before, path="step-1", imported=False, step=1)
    resume.check(found, before, 10, own=True)
    assert not caplog.records
    resume.check(
        found, {**before, resume.COMPUTED_ON: "cpu AVX2, 2 thread(s), torch 2.13.0"}, 10, own=True
    )
    assert "computed on cpu AVX2, 1 thread(s)" in caplog.text
