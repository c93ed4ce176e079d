"""One job at a time writes checkpoints into a folder.

Owns: the lock files, and which of them mean nothing any more. Must not know: checkpoints. HDF5 and MPI-IO protect
nothing: a second writer truncates the file of the first.

[Note: Publish, then look]
Every process that wants the folder first makes a file of its own, ``.lock-<token>``, and then looks at all others. Of
two, the one that looked last has seen the other, so both cannot go on; and nobody ever removes, renames or replaces a
file that may have become somebody else's meanwhile, as one must with a single lock file that a dead job left behind.
A file has one of two states. Whoever sees another that holds gives up. Whoever sees another that asks waits for it if
its own token is the smaller one, and makes way otherwise; so of several that ask, one gets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hpczero.environment import Environment
from hpczero.errors import CheckpointBusy, CheckpointNotWritten

BEAT_S = 15.0
DEAD_S = 120.0  # without a beat; clocks of hosts may differ by less
ASKING_S = 10.0  # how long another may ask without holding; it takes a few calls of the file system
LOOK_S = 0.02

_NAME = re.compile(r"\.lock-([0-9a-f]{16})")


@dataclass(frozen=True)
class _Claim:
    """What one lock file says."""

    token: str
    path: Path
    said: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Whether it has what it asked for, as far as one can tell."""
        return self.said.get("state") != "asks"

    def __str__(self) -> str:
        job = f"job {self.said['job']}, " if self.said.get("job") else ""
        return f"{job}process {self.said.get('pid')} on {self.said.get('host')} ({self.path.name})"


class Lock:
    """Held from ``acquire`` to ``release`` by one process; a thread shows that it is alive. Use it on one rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """Our file."""
        return self._folder / f".lock-{self._token}"

    def acquire(self) -> None:
        """Take the lock; those of jobs that have ended do not count, and go.

        Raises:
            CheckpointBusy: another job holds it; says which.
            CheckpointNotWritten: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                self._ask()
                self._say("holds")
                for claim in self._others(living=False):
                    claim.path.unlink(missing_ok=True)
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CheckpointNotWritten(
                f"{self._folder}: cannot be written ({os.strerror(error.errno or 0)}); check the path, its permissions "
                "and the quota"
            ) from error
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="hpczero-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See that it is still ours: a job that stood still for long is taken for dead by those on other hosts.

        Raises:
            CheckpointBusy: another job has the folder now, or had it meanwhile.
        """
        others = [claim for claim in self._others() if claim.holds]
        if self.path.exists() and not others:
            return
        now = f"is held by {others[0]}" if others else "was taken over"
        raise CheckpointBusy(
            f"{self._folder}: this job has shown no life for more than {DEAD_S:.0f} s, and the folder {now}; two jobs "
            "must not write to one folder, so end one of them"
        )

    def release(self) -> None:
        """Let others in; nothing if it is not held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
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

    def _ask(self) -> None:
        """Return when we are seen to ask, and no other asks or holds. See [Note: Publish, then look]."""
        deadline = time.monotonic() + ASKING_S
        self._say("asks")
        while others := self._others():
            holder = next((claim for claim in others if claim.holds), None)
            if holder is not None or time.monotonic() > deadline:
                raise CheckpointBusy(
                    f"{self._folder}: held by {holder or others[0]}; two jobs must not write to one folder. Give this "
                    "one another --run.name, or end that one; if it has ended, remove the file"
                )
            first = min(others, key=lambda claim: claim.token)
            if first.token < self._token:
                self.path.unlink()
                while time.monotonic() < deadline and self._asks(first):
                    time.sleep(LOOK_S)
                self._say("asks")
            else:
                time.sleep(LOOK_S)

    def _asks(self, other: _Claim) -> bool:
        """Whether ``other`` lives and does not know yet."""
        return any(c.token == other.token and not c.holds for c in self._others())

    def _say(self, state: str) -> None:
        """Make our file, or give it another content; its name is there throughout, and whoever reads it reads all."""
        me = {
            "state": state,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "job": Environment.read().job,
            "restart": Environment.read().restart,
        }
        aside = self.path.with_name(f".aside{self.path.name}")
        try:
            aside.write_text(json.dumps(me), encoding="utf-8")
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _others(self, *, living: bool = True) -> list[_Claim]:
        """Claims of other processes that live, or of those that do not."""
        found = []
        for path in self._folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or name[1] == self._token:
                continue
            try:
                said = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue  # gone since
            except ValueError:
                said = None
            claim = _Claim(name[1], path, said if isinstance(said, dict) else {})
            if _lives(claim) is living:
                found.append(claim)
        return found

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _lives(claim: _Claim) -> bool:
    said = claim.said
    job = Environment.read().job
    restart = Environment.read().restart
    if job and said.get("job") == job and said.get("restart") != restart:
        return False  # this very job, before it was requeued
    if said.get("host") == socket.gethostname():
        pid = said.get("pid")
        return isinstance(pid, int) and _started(pid) == said.get("started") != ""
    try:
        return time.time() - claim.path.stat().st_mtime < DEAD_S
    except OSError:
        return False


def _started(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; empty if there is none: numbers are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
