"""Memory that this machine has for the processes of a job, and the limits on it.

Read from the kernel's files, from cgroups of both versions and from limits of the process. Every reader takes the root
of the file system, so tests can read files of another machine.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

UNLIMITED = 2**60  # cgroup v1 writes 2^63 less a page
SHARED_FOLDER = Path("/dev/shm")
# Where Linux systems mount the hierarchy that limits memory, by the version of cgroups.
CGROUPS = {2: "sys/fs/cgroup", 1: "sys/fs/cgroup/memory"}

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
    for version, mount in CGROUPS.items():
        inside = _own_group(root, version)
        if inside is None:
            continue
        folder = root / mount / inside.lstrip("/")
        # A container may see its own group as the root, and the path that the group has outside.
        if ".." in Path(inside).parts or not folder.is_dir():
            inside, folder = "/", root / mount
        while True:
            name = f"/{inside.strip('/')}"
            found = _room_of(version, folder, name, swap)
            if found is not None:
                yield found
            if name == "/":
                break
            inside, folder = name.rpartition("/")[0], folder.parent
            if version == 1 and _number(folder / "memory.use_hierarchy") == 0:
                break  # its limit is for its own processes alone


def _room_of(version: int, folder: Path, name: str, swap: int) -> Room | None:
    file, in_use = {
        1: ("memory.limit_in_bytes", ("total_rss", "total_shmem")),
        2: ("memory.max", ("anon", "shmem")),
    }[version]
    limit = _number(folder / file)
    if limit is None:
        return None
    if version == 2:
        beyond = _number(folder / "memory.swap.max")
    else:  # the limit on memory and swap together
        both = _number(folder / "memory.memsw.limit_in_bytes")
        beyond = None if both is None else max(both - limit, 0)
    counts = _counts(folder / "memory.stat")
    used = sum(counts.get(each, 0) for each in in_use)
    title = f"the memory limit of control group {name} ({file})"
    most = limit + (swap if beyond is None else min(beyond, swap))
    return Room(title, f"v{version}{name}", "resident", most, used)


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
    number = _digits(_text(path).strip())
    return number if number is not None and number < UNLIMITED else None


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 30 else None


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
