"""The lock of a folder of checkpoints: one job at a time, and none kept out by the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint import lock as module
from hpczero.checkpoint.lock import DEAD_S, Lock
from hpczero.errors import EXIT_MISCONFIGURED, CheckpointBusy, CheckpointNotWritten

ROUNDS, RACERS = 60, 4

DIES_HOLDING = """
import os, sys
from pathlib import Path
from hpczero.checkpoint.lock import Lock
Lock(Path(sys.argv[1])).acquire()
os._exit(9)
"""


def die_holding(folder: Path, **environment: str) -> Path:
    """A process takes the lock of ``folder`` and is gone; returns its file."""
    command = [sys.executable, "-c", DIES_HOLDING, os.fspath(folder)]
    done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    assert done.returncode == 9
    return only_file(folder)


def only_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def is_free(folder: Path) -> bool:
    try:
        with Lock(folder):
            return True
    except CheckpointBusy:
        return False


def test_second_holder_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with Lock(tmp_path / "ckpt"):
        with pytest.raises(CheckpointBusy) as caught:
            Lock(tmp_path / "ckpt").acquire()
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
        assert str(tmp_path / "ckpt") in str(caught.value)
        assert caught.value.exit_code == EXIT_MISCONFIGURED
        assert not is_free(tmp_path / "ckpt")  # nor did the refusal change anything


def test_release_leaves_nothing_and_lets_the_next_in(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    for _ in range(2):  # the same lock may be taken again
        with lock:
            assert len(list(tmp_path.iterdir())) == 1
        assert list(tmp_path.iterdir()) == []
    lock.release()  # not held: nothing
    assert is_free(tmp_path)


def test_a_lock_taken_again_still_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    lock = Lock(tmp_path)
    for _ in range(2):
        with lock:
            os.utime(lock.path, (1e9, 1e9))
            deadline = time.monotonic() + 10
            while lock.path.stat().st_mtime < 1.5e9 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert lock.path.stat().st_mtime > 1.5e9


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    die_holding(tmp_path)
    assert is_free(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    edit(die_holding(tmp_path), pid=os.getpid())
    assert is_free(tmp_path)


@pytest.mark.parametrize(("age", "free"), [(0.0, False), (DEAD_S / 2, False), (2 * DEAD_S, True)])
def test_holder_on_another_host_lives_as_long_as_it_beats(
    tmp_path: Path, age: float, free: bool
) -> None:
    file = die_holding(tmp_path)
    edit(file, host="node99", pid=os.getpid())
    os.utime(file, (time.time() - age,) * 2)
    if not free:
        with pytest.raises(CheckpointBusy, match=f"process {os.getpid()} on node99"):
            Lock(tmp_path).acquire()
    assert is_free(tmp_path) is free


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_a_lock_that_says_nothing_counts_until_it_is_old(tmp_path: Path, content: str) -> None:
    file = die_holding(tmp_path)
    file.write_text(content)
    assert not is_free(tmp_path)
    os.utime(file, (1e9, 1e9))
    assert is_free(tmp_path)


def test_requeued_job_takes_over_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(die_holding(tmp_path, SLURM_JOB_ID="123"), host="node99")  # a heartbeat of just now
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert not is_free(tmp_path)  # the same run of the job: two steps of it
    monkeypatch.setenv("SLURM_JOB_ID", "124")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(CheckpointBusy, match="job 123, process"):
        Lock(tmp_path).acquire()
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert is_free(tmp_path)


@pytest.mark.parametrize("mine", ["0" * 16, "f" * 16])
def test_judging_a_stale_lock_does_not_take_away_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    """Between our judgement of a dead lock and what we do then, another takes it."""
    die_holding(tmp_path)
    first, second = Lock(tmp_path), Lock(tmp_path)
    first._token = mine
    held = []
    lives = module._lives

    def meanwhile(*args: Any) -> bool:
        verdict = lives(*args)
        monkeypatch.setattr(module, "_lives", lives)
        held.append(acquires(second))
        return verdict

    monkeypatch.setattr(module, "_lives", meanwhile)
    monkeypatch.setattr(module, "ASKING_S", 0.3)
    held.append(acquires(first))
    assert sum(held) <= 1
    first.release()
    second.release()
    assert is_free(tmp_path)
    assert list(tmp_path.iterdir()) == []


def acquires(lock: Lock) -> bool:
    try:
        lock.acquire()
    except CheckpointBusy:
        return False
    return True


def race(folder: Path, seed: int, line: Any, held: Any) -> None:
    """One racer: ``ROUNDS`` times, tell whether it got the lock while the others still try."""
    draw = random.Random(seed)
    lives = module._lives

    def slowly(*args: Any) -> bool:
        verdict = lives(*args)
        time.sleep(draw.choice((0.0, 0.0, 0.001, 0.003)))
        return verdict

    setattr(module, "_lives", slowly)  # noqa: B010  (this process ends here)
    for number in range(ROUNDS):
        place = folder / str(number)
        line.wait(30)
        lock = Lock(place)
        if acquires(lock):
            with held.get_lock():
                held[number] += 1
        line.wait(30)
        lock.release()


def test_of_racers_for_a_stale_lock_exactly_one_wins(tmp_path: Path) -> None:
    stale = die_holding(tmp_path / "origin")
    for number in range(ROUNDS):
        (tmp_path / str(number)).mkdir()
        if number % 3:  # and in every third round there is no lock at all
            (tmp_path / str(number) / stale.name).write_bytes(stale.read_bytes())
    start = multiprocessing.get_context("spawn")
    line, held = start.Barrier(RACERS), start.Array("i", ROUNDS)
    racers = [
        start.Process(target=race, args=(tmp_path, seed, line, held)) for seed in range(RACERS)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert held[:] == [1] * ROUNDS
    assert not [file for number in range(ROUNDS) for file in (tmp_path / str(number)).iterdir()]


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "ckpt", Path("/proc/hpczero")):
        with pytest.raises(CheckpointNotWritten, match=r"cannot be written \("):
            Lock(folder).acquire()


def taken_for_dead(lock: Lock) -> None:
    """To others it looks like a job on another host that has not been heard of for long."""
    edit(lock.path, host="elsewhere")
    os.utime(lock.path, (0, time.time() - 2 * DEAD_S))


def test_a_holder_that_was_taken_for_dead_learns_it(tmp_path: Path) -> None:
    with Lock(tmp_path) as lost:
        lost.check()
        taken_for_dead(lost)
        with Lock(tmp_path) as other:
            other.check()
            with pytest.raises(CheckpointBusy, match=r"no life .* is held by process \d+ on"):
                lost.check()
        with pytest.raises(CheckpointBusy, match="was taken over"):
            lost.check()
    assert is_free(tmp_path)
