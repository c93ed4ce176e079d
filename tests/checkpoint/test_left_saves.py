"""Saves in the background that a program leaves behind: at its last line, by an exit, by an exception in ``close``."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.checkpoint.__main__ import Verdict, verify
from tests.helpers.mpirun import Finished, run_ranks

PROGRAM = """
import signal, sys, threading, time
from pathlib import Path
import torch
import hpczero
from hpczero.checkpoint import Checkpoints

folder, go_on = Path(sys.argv[1]), threading.Event()
model = torch.nn.Linear(300, 300)
hpczero.zeroify(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1)
topology = hpczero.sharding(model).topology

def hold():  # before anything is written
    pass

def at(name):
    if name == "created":
        hold()

def until_the_interpreter_ends():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    time.sleep(0.3)

checkpoints = Checkpoints(folder, model, background=True, at=at, slab_nbytes=4096)
"""

ENDS = {
    "the last line": """
hold = until_the_interpreter_ends
checkpoints.save(7)
""",
    "an exit in the block": """
hold = until_the_interpreter_ends
with checkpoints:
    checkpoints.save(7)
    sys.exit()
""",
    "an end of MPI": """
from mpi4py import MPI
hold = lambda: time.sleep(0.3)
checkpoints.save(7)
MPI.Finalize()
""",
}

FAILS = """
def hold():
    raise OSError(5, "the disk has gone")

checkpoints.save(7)
"""

NO_THREAD = """
start = threading.Thread.start

def only_others(self):
    if self.name == "hpczero-NAME" and topology.is_root:
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = only_others
with checkpoints:
    checkpoints.save(7)
"""

INTERRUPTED = """
def interrupt(number, frame):
    raise TimeoutError("10 minutes left")

hold = lambda: go_on.wait(60)
signal.signal(signal.SIGALRM, interrupt)
checkpoints.save(7)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    checkpoints.close()
except TimeoutError:
    print("cut short", flush=True)
print("locked", len(list(folder.glob(".lock-*"))), flush=True)
busy = checkpoints.busy
threading.Timer(0.3, go_on.set).start()
print(busy, checkpoints.wait(), flush=True)
print("locked", len(list(folder.glob(".lock-*"))), flush=True)
"""


def job_of(text: str, folder: Path, ranks: int, *, sound: bool = True) -> Finished:
    """PROGRAM and ``text``, run to their end; it leaves a checkpoint of step 7 that is ``sound``."""
    program = folder / "program.py"
    program.write_text(PROGRAM + text)
    job = run_ranks(ranks, [program, folder], timeout=60)
    if sound:
        job.ended()
        assert verify(folder / "step-000000007").verdict is Verdict.SOUND, job
    return job


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_with_a_save_in_flight_leaves_a_whole_checkpoint(
    tmp_path: Path, ranks: int, end: str
) -> None:
    job = job_of(ENDS[end], tmp_path, ranks)
    assert "shutdown" not in job.stderr, job


def test_a_program_that_ends_without_hearing_of_a_failed_save_says_so_at_its_end(
    tmp_path: Path,
) -> None:
    job = job_of(FAILS, tmp_path, 2, sound=False)
    assert job.stderr.count("the save in flight when the program ended has failed") == 1, job
    assert "the disk has gone" in job.stderr, job


def test_an_exception_while_close_waits_leaves_the_save_its_communicator_and_its_lock(
    tmp_path: Path,
) -> None:
    job = job_of(INTERRUPTED, tmp_path, 1)
    path = tmp_path / "step-000000007"
    assert job.stdout.splitlines() == ["cut short", "locked 1", f"True {path}", "locked 0"], job


@pytest.mark.parametrize("name", ["pwrite", "checkpoint"])
def test_a_save_is_written_where_the_system_gives_one_rank_no_thread_for_it(
    tmp_path: Path, name: str
) -> None:
    job_of(NO_THREAD.replace("NAME", name), tmp_path, 2)
