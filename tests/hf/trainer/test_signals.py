"""A signal to one rank in a step, an evaluation or a save: an error in seconds, or a checkpoint of all ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cases import EVERYTHING
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import end_family, launch_environment

CODES = {"raise": 1, "default": 128 + signal.SIGTERM, "flag": 0}
CASES = [("fabric", "save", "raise", 1)]
if EVERYTHING:
    CASES = [
        (kind, phase, handler, rank)
        for kind in ("fabric", "trainer")
        for phase in ("step", "evaluation", "save")
        for handler, rank in (("raise", 0), ("default", 1), ("flag", 1))
    ]


def started(log: Path, *words: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "tests.hf.trainer.signal_program", *words]
    with log.open("w") as output:
        return subprocess.Popen(
            [os.fspath(ROOT / "install" / "launch.sh"), "2", *program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=launch_environment(PYTHONPATH=os.fspath(ROOT)),
            cwd=ROOT,
            start_new_session=True,
        )


def done(text: str) -> set[tuple[str, str]]:
    """Steps and digests of weights that ranks have ended with."""
    return set(re.findall(r"DONE \d (\d+) (\d+)", text))


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize(("kind", "phase", "handler", "rank"), CASES)
def test_a_signal_to_one_rank_ends_all_and_the_next_job_goes_on(
    tmp_path: Path, kind: str, phase: str, handler: str, rank: int
) -> None:
    log = tmp_path / "log"
    job = started(log, kind, phase, handler, str(tmp_path / "run"))
    try:
        while job.poll() is None and log.read_text().count("NOW ") < 2:
            time.sleep(0.02)
        found = dict(re.findall(r"PID (\d) (\d+)", log.read_text()))
        os.kill(int(found[str(rank)]), signal.SIGTERM)
        code = job.wait(120)  # the watchdog waits half an hour
    finally:
        end_family(job.pid, grace_s=0.5)
    assert code == CODES[handler], log.read_text()
    assert len(done(log.read_text())) == (handler == "flag"), log.read_text()
    ends = []
    for folder in ("run", "fresh"):  # goes on, and from the beginning
        job = started(log, kind, "none", "default", str(tmp_path / folder))
        try:
            assert job.wait(240) == 0, log.read_text()
        finally:
            end_family(job.pid, grace_s=0.5)
        ends.append(done(log.read_text()))
    assert ends[0] == ends[1], ends
    assert len(ends[0]) == 1, ends
