"""The lock of a folder that is moved, or served by a file server that forgets, while jobs ask for it."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import CheckpointBusy
from tests.checkpoint.test_lock import DIES_HOLDING, is_free
from tests.helpers.mpirun import run_command

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
    run_command([sys.executable, "-c", DIES_HOLDING, str(tmp_path)], timeout=30)
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
