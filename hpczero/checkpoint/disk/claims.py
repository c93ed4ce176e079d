"""Which processes ask for a folder of checkpoints or hold it, and whether they are alive.

Owns: what a lock file says, and the verdict. Must not know: how the lock is taken.

[Note: Alive]
A process number means something only to the kernel that gave it, in the namespace where it was given. Hosts, and
containers on one host, may share a name and a folder. A file therefore says which boot and which namespace its process
belongs to. If both are ours, the process table decides at once. Otherwise the file's age decides: a holder touches it
every 15 s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpczero.files.regular import read_bytes
from hpczero.options.environment import Environment

DEAD_S = 120.0  # without a beat
CLAIM_NBYTES = 4096  # more than any claim has
GONE = frozenset({errno.ENOENT, errno.ESTALE})  # the second is how a file server says it

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Claim:
    """What one lock file says, and when it was last touched: in seconds since the epoch, and seconds ago."""

    token: str
    path: Path
    said: dict[str, Any]
    beat: float  # its last sign of life
    age_s: float  # since then

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


def said_by(path: Path) -> dict[str, Any]:
    """What a lock file says; nothing, if it is no claim or cannot be read.

    Raises:
        OSError: the file is gone; its errno is in ``GONE``.
    """
    try:
        said = json.loads(read_bytes(path, CLAIM_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in GONE:
            raise
        return {}
    return said if isinstance(said, dict) else {}


def is_copy(said: Mapping[str, Any], folder: Path, inode: int) -> bool:
    """Whether a lock file with this inode was copied into ``folder`` with another folder's content.

    Either alone tells nothing: a folder may be renamed, or have other paths, and on some file systems a file has
    another inode on every host.
    """
    known = isinstance(said.get("inode"), int) and isinstance(said.get("folder"), str)
    return known and said["inode"] != inode and said["folder"] != folder_id(folder)


def folder_id(folder: Path) -> str:
    """A text that is equal for equal paths, links followed."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def lives(claim: Claim) -> bool:
    """Whether the claim counts ([Note: Alive])."""
    said = claim.said
    mine = Environment.read()
    if mine.job and said.get("job") == mine.job and _before(said.get("restart"), mine.restart):
        return False  # this very job, before it was requeued
    runs = by_process_table(said)
    return claim.age_s < DEAD_S if runs is None else runs


def _before(restart: object, ours: str) -> bool:
    if not (isinstance(restart, str) and restart.isdecimal() and ours.isdecimal()):
        return False
    return int(restart) < int(ours)


def own_place() -> dict[str, str]:
    """Boot and namespace in which our process number means something; unknown without a namespace."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        # Another number: /proc shows the processes of another namespace than ours.
        if os.readlink("/proc/self") == str(os.getpid()):
            namespace = os.readlink("/proc/self/ns/pid")
            boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace if boot else ""}


def by_process_table(said: Mapping[str, Any]) -> bool | None:
    """Whether the process of a claim runs, by this kernel's process table; None if the table does not tell."""
    place = own_place()
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
    found = started_at(pid)
    return found == started if found else None  # hidden from us: somebody else's


def started_at(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; empty if it is not running. Numbers are used again.

    A process that has ended, but whose parent has not noticed yet, is not running.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
