"""One job at a time writes checkpoints into a folder.

HDF5 and MPI-IO protect nothing: a second writer truncates the file of the first.

[Note: Publish, then look]
Every process that wants the folder first makes a lock file of its own, ``.lock-<token>``, and then looks at all others.
Of two processes the one that looked last has seen the other, so they cannot both go on. No process changes a file that
may have become another's meanwhile; a single lock file, left behind by a dead job, would need that. A lock file says
whether its process asks or holds. A process that sees a holder gives up. Of processes that ask, the smallest token goes
first, and the others make way.

[Note: Alive]
A process number means something only to the kernel that gave it, in the namespace where it was given. Hosts, and
containers on one host, may share a name and a folder. A lock file therefore says which boot and which namespace its
process belongs to. If both are ours, the process table decides at once. Otherwise the file's age decides: a holder
touches its file every 15 s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpczero.errors import CheckpointBusy, CheckpointNotWritten
from hpczero.files.regular import read_bytes
from hpczero.options.environment import Environment

logger = logging.getLogger("hpczero.checkpoint")

DEAD_S = 120.0  # without a beat
BEAT_S = 15.0
ASKING_S = 10.0  # how long another may ask without holding; it takes a few calls of the file system
LOOK_S = 0.02
PAUSE_S = 1.0  # between two looks at a holder who may be dead
TRIES = 3  # a folder that another has made for its lock goes with that lock
CLAIM_NBYTES = 4096  # more than any claim has
GONE = frozenset({errno.ENOENT, errno.ESTALE})  # the second is how a file server says it

_NAME = re.compile(r"\.lock-([0-9a-f]{16})")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the host sleeps
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Claim:
    """What one lock file says, and when its process last showed life: in seconds since the epoch, and seconds ago."""

    token: str
    path: Path
    said: dict[str, Any]
    beat: float
    age_s: float

    @property
    def holds(self) -> bool:
        """Whether the process has the folder, as far as the file tells."""
        return self.said.get("state") != "asks"

    def __str__(self) -> str:
        where = f"{self.path.name}, {max(self.age_s, 0.0):.0f} s after its last sign of life"
        if "pid" not in self.said:
            return f"somebody who cannot be told ({where})"
        job, pid, host = (str(self.said.get(key) or "")[:80] for key in ("job", "pid", "host"))
        return f"{f'job {job}, ' if job else ''}process {pid} on {host} ({where})"


def _said_by(path: Path) -> dict[str, Any]:
    """What a lock file says; nothing, if it is no claim or cannot be read."""
    try:
        said = json.loads(read_bytes(path, CLAIM_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in GONE:
            raise
        return {}
    return said if isinstance(said, dict) else {}


def _is_copy(said: Mapping[str, Any], folder: Path, inode: int) -> bool:
    """Whether a lock file with this inode came into ``folder`` by a copy of another folder."""
    # Either alone tells nothing: a folder may be renamed, and some file systems give other inodes on every host.
    known = isinstance(said.get("inode"), int) and isinstance(said.get("folder"), str)
    return known and said["inode"] != inode and said["folder"] != _folder_id(folder)


def _folder_id(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def lives(claim: Claim) -> bool:
    """Whether the claim counts ([Note: Alive])."""
    said = claim.said
    mine = Environment.read()
    if mine.job and said.get("job") == mine.job and _before(said.get("restart"), mine.restart):
        return False  # this very job, before it was requeued
    runs = _by_process_table(said)
    return claim.age_s < DEAD_S if runs is None else runs


def _before(restart: object, ours: str) -> bool:
    if not (isinstance(restart, str) and restart.isdecimal() and ours.isdecimal()):
        return False
    return int(restart) < int(ours)


def _own_place() -> dict[str, str]:
    """Boot and namespace in which our process number means something; unknown without a namespace."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        # Another number: /proc shows the processes of another namespace than ours.
        if os.readlink("/proc/self") == str(os.getpid()):
            namespace = os.readlink("/proc/self/ns/pid")
            boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace if boot else ""}


def _by_process_table(said: Mapping[str, Any]) -> bool | None:
    """Whether the process of a claim runs, by this kernel's process table; None if the table does not tell."""
    place = _own_place()
    if not place["namespace"] or any(said.get(key) != value for key, value in place.items()):
        return None
    pid, started = said.get("pid"), said.get("started")
    if type(pid) is not int or not 0 < pid < 2**31 or not isinstance(started, str) or not started:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    found = _started_at(pid)
    return found == started if found else None  # hidden from us: somebody else's


def _started_at(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; empty if it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]  # ended, and its parent has not noticed


def is_claimed(folder: Path) -> bool:
    """Whether some process, alive or not, has a lock file in the folder; its content may change then."""
    try:
        return any(_NAME.fullmatch(name) for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # nobody knows
        return True


def living_holder(folder: Path) -> Claim | None:
    """The process that has the folder, if it lives ([Note: Alive]); None also where nobody knows."""
    try:
        return next((claim for claim in Lock(folder)._others() if claim.holds), None)
    except OSError:
        return None


class Lock:
    """Held from ``acquire`` to ``release`` by one process; a thread shows that it is alive. Use it on one rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(8)
        self._made: list[Path] = []  # folders made for our file, innermost first
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._beaten = 0.0  # when last, by _CLOCK
        self._silence_s = 0.0  # the longest between two beats
        self._stays = self._asked = False  # to stay; meanwhile, to be released
        self._guard = threading.Lock()

    @property
    def path(self) -> Path:
        """Path of our lock file."""
        return self._folder / f".lock-{self._token}"

    @property
    def held(self) -> bool:
        """Whether it was acquired and not released since. ``check`` says whether others agree."""
        return self._thread is not None

    def acquire(self, patience_s: float = 0.0) -> None:
        """Take the lock. Lock files of jobs that have ended do not count, and are removed.

        Args:
            patience_s: seconds to wait for a holder of which nobody here knows whether it is alive. It ends when the
                holder shows that it is, or has been silent for so long that it does not count.

        Raises:
            CheckpointBusy: another job holds it; the message says which.
            CheckpointNotWritten: the folder cannot be written.
        """
        deadline = time.monotonic() + patience_s
        first: Claim | None = None
        try:
            while (holder := self._attempt()) is not None:
                beats = first is not None and (
                    (holder.token, holder.beat) != (first.token, first.beat)
                )
                known = _by_process_table(holder.said) is not None
                if beats or known or time.monotonic() >= deadline:
                    raise CheckpointBusy(
                        f"{self._folder}: held by {holder}; two jobs must not write to one folder. Give this "
                        "one another --run.name, or end that one; if it has ended, remove the file"
                    )
                if first is None:
                    logger.warning(
                        "%s: held by %s; waiting for up to %.0f s to see whether it lives",
                        self._folder,
                        holder,
                        patience_s,
                    )
                first = first or holder
                time.sleep(PAUSE_S)
        except (OSError, CheckpointBusy) as error:
            self._unmake()
            if isinstance(error, CheckpointBusy):
                raise
            raise CheckpointNotWritten(
                f"{self._folder}: cannot be written ({os.strerror(error.errno or 0)}); check the path, its permissions "
                "and the quota"
            ) from error
        self._stop.clear()
        self._beaten, self._silence_s = time.clock_gettime(_CLOCK), 0.0
        self._thread = threading.Thread(target=self._beat, name="hpczero-lock", daemon=True)
        self._thread.start()

    def _attempt(self) -> Claim | None:
        self._made += [p for p in (self._folder, *self._folder.parents) if not p.exists()]
        for last in range(TRIES):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                holder = self._ask()
                if holder is None:
                    self._say("holds")
                    break
                self.path.unlink(missing_ok=True)
                return holder
            except BaseException as error:
                self.path.unlink(missing_ok=True)
                if not isinstance(error, FileNotFoundError) or last == TRIES - 1:
                    raise
        with contextlib.suppress(OSError):  # it is ours by now, whatever becomes of these
            for claim in self._others(living=False):
                with contextlib.suppress(OSError):  # somebody else's, whom it does not help
                    claim.path.unlink()
        return None

    def check(self) -> None:
        """See that the lock is still ours. A job that stood still for long is taken for dead by jobs on other hosts.

        Raises:
            CheckpointBusy: another job has the folder now, or had it meanwhile.
        """
        others = [claim for claim in self._others() if claim.holds]
        if self.path.exists() and not others:
            return
        silence_s = max(self._silence_s, time.clock_gettime(_CLOCK) - self._beaten)
        why = (
            f"this job has shown no life for {silence_s:.0f} s"
            if silence_s > DEAD_S
            else f"the file {self.path.name}, by which this job holds it, was taken away by somebody else"
            if not self.path.exists()
            else "another job does not see this one"
        )
        now = f"is held by {others[0]}" if others else "may have changed"
        raise CheckpointBusy(
            f"{self._folder}: {why}, and the folder {now}; two jobs must not write to one folder, so end one of them"
        )

    def release(self) -> None:
        """Let others in; does nothing if the lock is not held."""
        with self._guard:
            self._asked = self._stays and self.held
            if self._stays:
                return
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._unmake()

    def stay(self) -> None:
        """Keep the lock until ``leave``, even if it is released before: something is still being written."""
        with self._guard:
            self._stays = True

    def leave(self) -> None:
        """End ``stay``. Releases the lock if that was asked for meanwhile. Any thread may call it."""
        with self._guard:
            self._stays, asked = False, self._asked
            self._asked = False
        if asked:
            self.release()

    def follow(self, folder: Path) -> None:
        """Hold the lock in a new folder at the old path, after the folder was renamed to ``folder``.

        Raises:
            CheckpointBusy: another job was faster.
            CheckpointNotWritten: as ``acquire``.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.acquire()
        with contextlib.suppress(OSError):
            (folder / self.path.name).unlink()

    def _unmake(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):  # something came into it
                path.rmdir()
        self._made = []

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _ask(self) -> Claim | None:
        """Ask until no other process asks or holds ([Note: Publish, then look]), or return who does."""
        deadline = time.monotonic() + ASKING_S
        self._say("asks")
        while others := self._others():
            holder = next((claim for claim in others if claim.holds), None)
            if holder is not None or time.monotonic() > deadline:
                return holder or others[0]
            first = min(others, key=lambda claim: claim.token)
            if first.token < self._token:
                self.path.unlink(missing_ok=True)
                while time.monotonic() < deadline and self._asks(first):
                    time.sleep(LOOK_S)
                self._say("asks")
            else:
                time.sleep(LOOK_S)
        if not self.path.exists():
            # The folder we asked in was moved away by its holder: nobody has seen us ask in this one.
            raise FileNotFoundError(errno.ENOENT, "was moved away meanwhile", str(self.path))
        return None

    def _asks(self, other: Claim) -> bool:
        return any(c.token == other.token and not c.holds for c in self._others())

    def _say(self, state: str) -> None:
        """Make our file, or replace its content: its name stays, and every reader sees a whole content."""
        me: dict[str, Any] = {
            "state": state,
            "folder": _folder_id(self._folder),
            **_own_place(),
            "pid": os.getpid(),
            "started": _started_at(os.getpid()),
            "job": Environment.read().job,
            "restart": Environment.read().restart,
        }
        aside = self.path.with_name(f".aside{self.path.name}")
        try:
            with aside.open("w", encoding="utf-8") as file:
                # A rename keeps it, a copy has another
                me["inode"] = os.fstat(file.fileno()).st_ino
                file.write(json.dumps(me))
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _others(self, *, living: bool = True) -> list[Claim]:
        found = []
        now = self._now()
        for path in self._folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or name[1] == self._token:
                continue
            try:
                entry = path.lstat()
                if not stat.S_ISREG(entry.st_mode):
                    logger.warning("%s: is no lock but something else; left alone", path)
                    continue
                said = _said_by(path)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                continue
            claim = Claim(name[1], path, said, entry.st_mtime, now - entry.st_mtime)
            copied = _is_copy(said, self._folder, entry.st_ino)
            if (lives(claim) and not copied) is living:
                found.append(claim)
        return found

    def _now(self) -> float:
        """The time by the clock that gives files their times, which may be the file server's."""
        try:
            os.utime(self.path)
            return self.path.stat().st_mtime
        except OSError:  # taken away
            return time.time()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)
                now = time.clock_gettime(_CLOCK)
                self._silence_s = max(self._silence_s, now - self._beaten)
                self._beaten = now
