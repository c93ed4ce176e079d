"""Memory that this machine has for the processes of a job, and the limits on it.

Owns: reading the kernel's files, cgroups of both versions, limits of the process. Must not know: MPI, torch, models,
what a run needs. Every reader takes the root of the file system, so tests can read files of another machine.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

UNLIMITED = 2**60  # cgroup v1 writes 2^63 less a page
SHARED_FOLDER = Path("/dev/shm")
CGROUPS = "/sys/fs/cgroup"

Kind = Literal["resident", "mapped", "private", "shared", "device"]


@dataclass(frozen=True)
class Room:
    """One bound on memory.

    Attributes:
        name: for a message.
        scope: ranks on the same host with the same scope share the bound; empty if this process alone has it.
        kind: which bytes count: ``resident`` all that are held, ``mapped`` address space, ``private`` writable memory
            of the process, ``shared`` files in /dev/shm, ``device`` memory of the device.
        nbytes: the bound in bytes.
        used: bytes of it that anybody uses now.
        yields: whether others may give back what they use. The bound is then no reason to refuse a run.
    """

    name: str
    scope: str
    kind: Kind
    nbytes: int
    used: int
    yields: bool = False


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process now, in bytes.

    Attributes:
        resident: pages of its own and its part of shared pages, without pages of files.
        of_files: its part of pages that are also in files: programs and libraries.
        mapped: address space.
        private: address space that is private and writable.
    """

    resident: int
    of_files: int
    mapped: int
    private: int

    def of(self, kind: Kind) -> int:
        """Bytes that count against a bound of this kind."""
        return {"resident": self.resident, "mapped": self.mapped, "private": self.private}.get(
            kind, 0
        )


def usage(root: Path = Path("/")) -> ProcessMemory:
    """Memory of this process now. Not collective."""
    pages = [_digits(word) or 0 for word in _text(root / "proc/self/statm").split()]
    fields = _table(root / "proc/self/smaps_rollup")
    resident = fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0)
    if "Pss_Anon" not in fields:  # before Linux 5.9: pages that nobody else has
        resident = fields.get("Private_Dirty", 0)
    page = os.sysconf("SC_PAGE_SIZE")
    return ProcessMemory(
        resident=resident,
        of_files=max(fields.get("Pss", 0) - resident, 0),
        mapped=pages[0] * page if pages else 0,
        private=pages[5] * page if len(pages) > 5 else 0,
    )


def rooms(root: Path = Path("/")) -> list[Room]:
    """Every bound on this process but a device's. Not collective."""
    memory = _table(root / "proc/meminfo")
    swap = memory.get("SwapTotal", 0)
    found = [*_limits_of_process(), *_cgroups(root, swap), *_shared_memory(root)]
    if memory.get("MemTotal"):
        found.append(
            Room(
                "physical memory" + (" and swap" if swap else ""),
                "host",
                "resident",
                memory["MemTotal"] + swap,
                memory["MemTotal"] - memory.get("MemAvailable", memory["MemTotal"]),
                yields=True,
            )
        )
    return found


def _limits_of_process() -> Iterator[Room]:
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if space != resource.RLIM_INFINITY:
        yield Room("ulimit -v, the address space of a process", "", "mapped", space, 0)
    if data != resource.RLIM_INFINITY:
        yield Room("ulimit -d, the private memory of a process", "", "private", data, 0)


def _shared_memory(root: Path) -> Iterator[Room]:
    folder = root / SHARED_FOLDER.relative_to("/")
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    nbytes, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if nbytes:
        yield Room(f"the size of {SHARED_FOLDER}", "shm", "shared", nbytes, nbytes - free)


def _cgroups(root: Path, swap: int) -> Iterator[Room]:
    """Control groups that limit this process's memory: its own and those above it."""
    for version, mount, top in _memory_mounts(root):
        path = _own_group(root, version)
        inside = None if path is None else _inside(path, top)
        if path is not None and inside is None and PurePosixPath(mount).is_relative_to(CGROUPS):
            inside = "/"  # a container is shown its own group where others see all of them
        if inside is None:
            continue
        folder = root / mount.lstrip("/") / inside.lstrip("/")
        if (
            not folder.is_dir()
        ):  # a container that sees its own group as the root, and the path of outside
            inside, folder = "/", root / mount.lstrip("/")
        while True:
            name = f"/{inside.strip('/')}"
            found = (_room_v2 if version == 2 else _room_v1)(folder, name, swap)
            if found is not None:
                yield found
            if name == "/":
                break
            inside, folder = name.rpartition("/")[0], folder.parent
            if version == 1 and _number(folder / "memory.use_hierarchy") == 0:
                break  # its limit is for its own processes alone


def _inside(path: str, top: str) -> str | None:
    """Where the group ``path`` lies under a mount that shows the group ``top``; None if it does not lie there."""
    group, above = PurePosixPath(path), PurePosixPath(top)
    if set(above.parts) <= {
        "/",
        "..",
    }:  # the root, or a group outside of this container that holds it
        return "/" if ".." in group.parts + above.parts else path
    return f"/{group.relative_to(above)}" if group.is_relative_to(above) else None


def _room_v1(folder: Path, name: str, swap: int) -> Room | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None:
        return None
    both = _number(folder / "memory.memsw.limit_in_bytes")
    beyond = swap if both is None else min(max(both - limit, 0), swap)
    counts = _counts(folder / "memory.stat")
    used = counts.get("total_rss", 0) + counts.get("total_shmem", 0)
    title = f"the memory limit of control group {name} (memory.limit_in_bytes)"
    return Room(title, f"v1{name}", "resident", limit + beyond, used)


def _room_v2(folder: Path, name: str, swap: int) -> Room | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        return None
    more = _number(folder / "memory.swap.max")
    counts = _counts(folder / "memory.stat")
    used = counts.get("anon", 0) + counts.get("shmem", 0)
    title = f"the memory limit of control group {name} (memory.max)"
    beyond = swap if more is None else min(more, swap)
    return Room(title, f"v2{name}", "resident", limit + beyond, used)


def _memory_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """(version, where it is mounted, which group that is) of each hierarchy that may limit memory."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = [_unescaped(word) for word in before.split()], after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            yield 2, fields[4], fields[3]
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield 1, fields[4], fields[3]


def _own_group(root: Path, version: int) -> str | None:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version == 2 and number == "0" and not controllers) or (
            version == 1 and "memory" in controllers.split(",")
        ):
            return path
    return None


def _number(path: Path) -> int | None:
    """The limit in a file; None where there is none."""
    text = _text(path).strip()
    number = _digits(text)
    return number if number is not None and number < UNLIMITED else None


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 30 else None


def _unescaped(word: str) -> str:
    """A path as it is: the kernel writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _counts(path: Path) -> dict[str, int]:
    """Lines ``name bytes`` as a table."""
    pairs = (line.split() for line in _text(path).splitlines())
    counts = {pair[0]: _digits(pair[1]) for pair in pairs if len(pair) == 2}
    return {name: count for name, count in counts.items() if count is not None}


def _table(path: Path) -> dict[str, int]:
    """Lines ``Name:  1234 kB`` as a table in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        number = _digits(words[0]) if len(words) == 2 and words[1] == "kB" else None
        if number is not None:
            found[name] = number * 1024
    return found


def _text(path: Path) -> str:
    """Text of a file; empty if it cannot be read, by an older kernel or in a container that hides it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
