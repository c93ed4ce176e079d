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

folder, held = Path(sys.argv[1]), threading.Event()
model = torch.nn.Linear(300, 300)
hpczero.zeroify(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1)
topology = hpczero.sharding(model).topology
"""

AFTER_THE_LAST_LINE = """
def at(name):
    if name == "created":  # nothing is written before the interpreter begins to end
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        time.sleep(0.3)

checkpoints = Checkpoints(folder, model, background=True, at=at, slab_nbytes=4096)
"""

ENDS_MPI = """
from mpi4py import MPI

checkpoints = Checkpoints(
    folder, model, background=True, at=lambda name: time.sleep(0.05), slab_nbytes=4096
)
checkpoints.save(7)
MPI.Finalize()
"""

FAILS = """
def at(name):
    if name == "created":
        raise OSError(5, "the disk has gone")

checkpoints = Checkpoints(folder, model, background=True, at=at)
checkpoints.save(7)
"""

NO_THREAD = """
start = threading.Thread.start

def only_others(self):
    if self.name == "hpczero-NAME" and topology.is_root:
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = only_others
with Checkpoints(folder, model, background=True, slab_nbytes=4096) as checkpoints:
    checkpoints.save(5)
"""

INTERRUPTED = """
def interrupt(number, frame):
    raise TimeoutError("10 minutes left")

def at(name):
    if name == "created":
        assert held.wait(60)

signal.signal(signal.SIGALRM, interrupt)
checkpoints = Checkpoints(folder, model, background=True, at=at, slab_nbytes=4096)
checkpoints.save(3)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    checkpoints.close()
except TimeoutError:
    print("cut short", flush=True)
print("locked", len(list(folder.glob(".lock-*"))), flush=True)
busy = checkpoints.busy
threading.Timer(0.3, held.set).start()
print(busy, checkpoints.wait(), flush=True)
print("locked", len(list(folder.glob(".lock-*"))), flush=True)
"""


def job_of(text: str, folder: Path, ranks: int) -> Finished:
    """PROGRAM and ``text``, run to their end; checkpoints are in ``folder / "ckpt"``."""
    program = folder / "program.py"
    program.write_text(PROGRAM + text)
    return run_ranks(ranks, [program, folder / "ckpt"], timeout=60)


ENDS = {
    "the last line": f"{AFTER_THE_LAST_LINE}checkpoints.save(7)\n",
    "an exit in the block": f"{AFTER_THE_LAST_LINE}with checkpoints:\n    checkpoints.save(7)\n    sys.exit()\n",
    "an end of MPI": ENDS_MPI,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_with_a_save_in_flight_leaves_a_whole_checkpoint(
    tmp_path: Path, ranks: int, end: str
) -> None:
    job = job_of(ENDS[end], tmp_path, ranks)
    assert job.returncode == 0, job
    assert "shutdown" not in job.stderr, job
    found = verify(tmp_path / "ckpt" / "step-000000007")
    assert found.verdict is Verdict.SOUND, (found, job)


def test_a_program_that_ends_without_hearing_of_a_failed_save_says_so_at_its_end(
    tmp_path: Path,
) -> None:
    job = job_of(FAILS, tmp_path, 2)
    assert job.stderr.count("the save in flight when the program ended has failed") == 1, job
    assert "the disk has gone" in job.stderr, job


def test_an_exception_while_close_waits_leaves_the_save_its_communicator_and_its_lock(
    tmp_path: Path,
) -> None:
    job = job_of(INTERRUPTED, tmp_path, 1)
    assert job.returncode == 0, job
    path = tmp_path / "ckpt" / "step-000000003"
    assert job.stdout.splitlines() == ["cut short", "locked 1", f"True {path}", "locked 0"], job
    assert verify(path).verdict is Verdict.SOUND, job


@pytest.mark.parametrize("name", ["pwrite", "checkpoint"])
def test_a_save_is_written_where_the_system_gives_one_rank_no_thread_for_it(
    tmp_path: Path, name: str
) -> None:
    job = job_of(NO_THREAD.replace("NAME", name), tmp_path, 2)
    assert job.returncode == 0, job
    assert verify(tmp_path / "ckpt" / "step-000000005").verdict is Verdict.SOUND, job
