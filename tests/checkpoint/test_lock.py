"""The lock of a folder of checkpoints: one job at a time, and none kept out by the dead."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint.disk import lock as module
from hpczero.checkpoint.disk.lock import DEAD_S, Lock
from hpczero.errors import EXIT_MISCONFIGURED, CheckpointBusy

ROUNDS, RACERS = 60, 4

DIES_HOLDING = """
import os, sys
from pathlib import Path
from hpczero.checkpoint.disk.lock import Lock
Lock(Path(sys.argv[1])).acquire()
os._exit(9)
"""


HOLDS = """
import sys
from pathlib import Path
from hpczero.checkpoint.disk import lock as module
from hpczero.errors import CheckpointBusy
module.BEAT_S, module.DEAD_S = float(sys.argv[2]), float(sys.argv[3])
lock = module.Lock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
try:
    lock.check()
    print("ours")
except CheckpointBusy as error:
    print(error)
"""


@contextlib.contextmanager
def holding(
    folder: Path, *prefix: str, beat_s: float = 15.0, dead_s: float = DEAD_S
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock inside, until it is given a line; ``prefix`` starts it."""
    words = [*prefix, sys.executable, "-c", HOLDS, str(folder), str(beat_s), str(dead_s)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, bufsize=1, **pipes) as holder:
        try:
            if holder.stdout and holder.stdout.readline() != "held\n":
                assert prefix, "the holder does not hold"
                pytest.skip(f"{' '.join(prefix)}: not allowed here")
            yield holder
        finally:
            holder.kill()


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


def test_folder_that_was_copied_with_the_lock_of_a_living_holder_is_free(tmp_path: Path) -> None:
    """``cp -r`` of a run that goes on; the holder keeps its own folder."""
    holder = Lock(tmp_path / "a")
    holder.acquire()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / holder.path.name).exists()
    with Lock(tmp_path / "b") as branch:
        branch.check()
        assert os.listdir(tmp_path / "b") == [branch.path.name]
    holder.check()
    (tmp_path / "a").rename(tmp_path / "renamed")
    (tmp_path / "link").symlink_to(tmp_path / "renamed")
    for path in (tmp_path / "renamed", tmp_path / "link"):
        with pytest.raises(CheckpointBusy, match="held by"):
            Lock(path).acquire()
    (tmp_path / "renamed").rename(tmp_path / "a")
    holder.release()


def test_lock_of_a_dead_process_is_taken_over_though_another_has_its_number(tmp_path: Path) -> None:
    for changes in ({}, {"pid": os.getpid()}):
        edit(die_holding(tmp_path), **changes)
        assert is_free(tmp_path)
        assert list(tmp_path.iterdir()) == []


# Of whom nobody can tell whether they live: fields of a lock, or all that it says.
UNKNOWN: list[dict[str, Any] | bytes] = [
    {"host": "node99", "pid": os.getpid()},
    {"namespace": "pid:[1]"},
    {"boot": "another"},
    {"boot": None},
    b"",
    b"[]",
    b"[" * 10**6,
    b"\xff\xfe{}",
    b'{"pid": 1e9}',
    b'{"pid": -1, "started": "1"}',
]


@pytest.mark.parametrize("said", UNKNOWN, ids=lambda said: repr(said)[:12])
def test_holder_that_nobody_can_look_for_lives_as_long_as_it_beats(
    tmp_path: Path, said: dict[str, Any] | bytes
) -> None:
    file = die_holding(tmp_path)
    if isinstance(said, bytes):
        file.write_bytes(said)
    else:
        edit(file, **said)
    for age, free in ((0.0, False), (DEAD_S / 2, False), (2 * DEAD_S, True)):
        os.utime(file, (time.time() - age,) * 2)
        assert is_free(tmp_path) is free


def test_living_holder_in_another_pid_namespace_is_not_taken_for_dead(tmp_path: Path) -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ("unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child")
    with holding(tmp_path, *unshare) as holder:
        file = only_file(tmp_path)
        said = json.loads(file.read_text())
        assert said["host"] == socket.gethostname()
        assert said["pid"] != holder.pid  # a number of that namespace, which may be anybody's here
        assert not is_free(tmp_path)
        os.utime(file, (time.time() - 2 * DEAD_S,) * 2)  # its heart stands still: it may be dead
        assert is_free(tmp_path)


def test_holder_that_has_ended_and_is_not_reaped_is_dead(tmp_path: Path) -> None:
    with holding(tmp_path) as holder:
        holder.kill()
        deadline = time.monotonic() + 10  # it becomes a zombie: nobody has waited for it
        while time.monotonic() < deadline and not is_free(tmp_path):
            time.sleep(0.01)
        assert is_free(tmp_path)


def test_patience_outlasts_a_silent_holder_and_ends_with_the_first_beat_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEAD_S", 1.0)
    monkeypatch.setattr(module, "PAUSE_S", 0.05)
    file = die_holding(tmp_path / "dead")
    edit(file, host="node99")
    lock = Lock(tmp_path / "dead")
    with pytest.raises(CheckpointBusy):
        lock.acquire()
    os.utime(file)
    lock.acquire(patience_s=30.0)
    lock.check()
    lock.release()
    with holding(tmp_path / "lives", beat_s=0.2):
        edit(only_file(tmp_path / "lives"), host="node99")
        began = time.monotonic()
        with pytest.raises(CheckpointBusy, match=r"process \d+ on node99"):
            Lock(tmp_path / "lives").acquire(patience_s=60.0)
        assert time.monotonic() - began < 10.0


@pytest.mark.limit(20)
def test_what_is_no_file_is_no_lock_and_is_left_alone(tmp_path: Path) -> None:
    names = [f".lock-{'0' * 15}{n}" for n in range(4)]
    os.mkfifo(tmp_path / names[0])
    (tmp_path / names[1]).mkdir()
    (tmp_path / names[2]).symlink_to("/dev/zero")
    (tmp_path / names[3]).symlink_to("nowhere")
    with Lock(tmp_path) as lock:
        lock.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_folders_made_for_a_lock_go_with_it_unless_something_came_into_them(tmp_path: Path) -> None:
    for kept in (False, True):
        with Lock(tmp_path / "runs" / "r" / "checkpoints"):
            if kept:
                (tmp_path / "runs" / "config").touch()
        assert (tmp_path / "runs").exists() is kept
        assert not (tmp_path / "runs" / "r").exists()


def test_held_in_a_new_folder_after_ours_was_moved_away(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with Lock(folder) as lock:
        (tmp_path / "run").rename(tmp_path / "old")
        lock.follow(tmp_path / "old" / "checkpoints")
        lock.check()
        assert not is_free(folder)
        assert list((tmp_path / "old" / "checkpoints").iterdir()) == []


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
    with Lock(tmp_path) as again:
        edit(again.path, host="node99")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
        assert not is_free(tmp_path)  # a straggler of the start before does not take it back
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
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
    lives = module.lives

    def meanwhile(*args: Any) -> bool:
        verdict = lives(*args)
        monkeypatch.setattr(module, "lives", lives)
        held.append(acquires(second))
        return verdict

    monkeypatch.setattr(module, "lives", meanwhile)
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
    lives = module.lives

    def slowly(*args: Any) -> bool:
        verdict = lives(*args)
        time.sleep(draw.choice((0.0, 0.0, 0.001, 0.003)))
        return verdict

    setattr(module, "lives", slowly)  # noqa: B010  (this process ends here)
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


def test_a_holder_that_stood_still_and_was_taken_for_dead_learns_why(tmp_path: Path) -> None:
    with holding(tmp_path, beat_s=0.05, dead_s=1.0) as holder:
        holder.send_signal(signal.SIGSTOP)
        file = only_file(tmp_path)
        edit(file, host="elsewhere")
        os.utime(file, (0, time.time() - 2 * DEAD_S))
        with Lock(tmp_path) as other:
            time.sleep(1.2)
            holder.send_signal(signal.SIGCONT)
            said, _ = holder.communicate("\n", timeout=30)
            other.check()
    assert "this job has shown no life for 1 s" in said
    assert f"is held by process {os.getpid()} on" in said


def test_a_holder_whose_file_was_taken_away_is_not_said_to_have_been_silent(tmp_path: Path) -> None:
    with Lock(tmp_path) as lost:
        lost.check()
        lost.path.unlink()  # as the refusal of another job tells its user
        with Lock(tmp_path) as other:
            other.check()
            with pytest.raises(CheckpointBusy, match=r"taken away by .* is held by process \d+ on"):
                lost.check()
        with pytest.raises(CheckpointBusy, match="taken away by somebody else") as caught:
            lost.check()
    assert "no life" not in str(caught.value)
    assert is_free(tmp_path)


# --- a folder that is moved, or served by a file server that forgets, while jobs ask for it


WAIT_S = 3.0


class Late(Lock):
    """Asks while the holder moves the folder away, and is slow to hold."""

    def __init__(self, run: Path, holder: Lock) -> None:
        super().__init__(run / "checkpoints")
        self._run, self._other, self._moved = run, holder, False
        self._following = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        with contextlib.suppress(CheckpointBusy):
            self._other.follow(self._run.with_name("old") / "checkpoints")

    def _others(self, *, living: bool = True) -> Any:
        if not self._moved:  # it asks, and has not looked yet
            self._moved = True
            self._run.rename(self._run.with_name("old"))
            (self._run / "checkpoints").mkdir(parents=True)
        return super()._others(living=living)

    def _say(self, state: str) -> None:
        if state == "holds":
            self._following.start()
            self._following.join(WAIT_S)
        super()._say(state)
        if state == "holds":
            self._following.join()


def test_of_a_holder_that_moves_its_folder_and_one_that_asks_meanwhile_one_holds(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    first = Lock(run / "checkpoints")
    first.acquire()
    second = Late(run, first)
    with contextlib.suppress(CheckpointBusy):
        second.acquire()
    assert first.held != second.held, f"the first {first.held}, the second {second.held}"
    first.release()
    second.release()


def test_lock_that_was_taken_is_ours_although_the_dead_cannot_be_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would leave our own file, which keeps everybody out as long as this process lives."""
    die_holding(tmp_path)
    iterdir = Path.iterdir

    def fails_for_a_holder(path: Path) -> Iterator[Path]:
        if path == tmp_path and any('"holds"' in p.read_text() for p in [lock.path] if p.exists()):
            raise OSError(errno.EIO, "Input/output error")
        return iterdir(path)

    lock = Lock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fails_for_a_holder)
        lock.acquire()
    assert lock.held
    lock.release()
    assert is_free(tmp_path)


def test_claim_that_the_file_server_has_forgotten_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / ".lock-0123456789abcdef"
    other.write_text("{}")
    lstat = Path.lstat

    def stale(path: Path) -> Any:
        if path == other:
            raise OSError(errno.ESTALE, "Stale file handle")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", stale)
    with Lock(tmp_path) as lock:
        assert lock.held
