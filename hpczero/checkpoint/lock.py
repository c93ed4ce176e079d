"""One job at a time writes checkpoints into a folder.

Owns: the lock file, and when one that is left behind may be taken over. Must not know: checkpoints. HDF5 and MPI-IO
protect nothing: a second writer truncates the file of the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from hpczero.errors import CheckpointBusy, CheckpointError

NAME = ".lock"
BEAT_S = 15.0
DEAD_S = 120.0  # without a beat; clocks of hosts may differ by less


class Lock:
    """Held from ``acquire`` to ``release`` by one process; a thread shows that it is alive. Use it on one rank."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, or that of a job which has ended.

        Raises:
            CheckpointBusy: another job holds it; says which.
            CheckpointError: the folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._make():
                holder = self._read()
                if holder is not None and _lives(holder, self.path):
                    raise CheckpointBusy(
                        f"{self.path}: held by {_describe(holder)}; two jobs must not write to one folder. Give this "
                        "one another --run.name, or end that one; if it has ended, remove the file"
                    )
                self._take_over()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written ({os.strerror(error.errno or 0)}); check the folder's permissions"
            ) from error
        self._thread = threading.Thread(target=self._beat, name="hpczero-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others in; nothing if it is not held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        holder = self._read()
        if holder is not None and holder.get("token") == self._token:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _make(self) -> bool:
        me = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }
        # Written aside and linked, so that whoever reads it reads all of it.
        aside = self.path.with_name(f"{NAME}.{self._token}")
        aside.write_text(json.dumps(me), encoding="utf-8")
        try:
            os.link(aside, self.path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def _take_over(self) -> None:
        # By a rename: of two that find the same stale lock, one gets it and the other looks again.
        with contextlib.suppress(FileNotFoundError):
            gone = self.path.with_name(f"{NAME}.{self._token}")
            self.path.rename(gone)
            gone.unlink()

    def _read(self) -> dict[str, object] | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _lives(holder: dict[str, object], path: Path) -> bool:
    job = os.environ.get("SLURM_JOB_ID", "")
    if (
        job
        and holder.get("job") == job
        and holder.get("restart") != os.environ.get("SLURM_RESTART_COUNT", "0")
    ):
        return False  # this very job, before it was requeued
    if holder.get("host") == socket.gethostname():
        pid = holder.get("pid")
        return isinstance(pid, int) and _started(pid) == holder.get("started") != ""
    try:
        return time.time() - path.stat().st_mtime < DEAD_S
    except OSError:
        return False


def _started(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; empty if there is none: numbers are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _describe(holder: dict[str, object]) -> str:
    job = f"job {holder['job']}, " if holder.get("job") else ""
    return f"{job}process {holder.get('pid')} on {holder.get('host')}"
