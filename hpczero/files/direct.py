"""Bytes at offsets of a file, writes past the kernel's cache, and stripes over the storage targets of Lustre."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpczero.errors import ConfigError
from hpczero.files.regular import answer

PAGE = mmap.PAGESIZE
MOST_ALIGNMENT = 2**20


def write_at(descriptor: int, offset: int, data: npt.NDArray[Any]) -> None:
    """All of ``data``, however little the system takes at a time."""
    left = np.ascontiguousarray(data).data.cast("B") if data.size else memoryview(b"")
    while left:
        written = os.pwrite(descriptor, left[: 2**30], offset)
        left, offset = left[written:], offset + written


def read_at(descriptor: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """(nbytes,) from ``offset`` on. Raises EOFError: the file ends before."""
    found = np.empty(nbytes, dtype=np.uint8)
    read_into(descriptor, offset, found)
    return found


def read_into(descriptor: int, offset: int, into: npt.NDArray[Any]) -> None:
    """As many bytes from ``offset`` on as ``into`` has. Raises EOFError: the file ends before."""
    left = into.data.cast("B") if into.size else memoryview(b"")
    while left:
        count = os.preadv(descriptor, [left[: 2**30]], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}")
        left, offset = left[count:], offset + count


def written_spans(descriptor: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of a sparse file that something was written to, in whole pages."""
    stop, nbytes = 0, os.fstat(descriptor).st_size
    while stop < nbytes:
        try:
            start = os.lseek(descriptor, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing up to the end
                return
            raise
        stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, stop


def open_direct(path: Path) -> int | None:
    """A descriptor whose writes go past the kernel's cache; None where the file system has none such."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def make_direct(descriptor: int) -> int:
    """Switch an open, empty file to calls past the kernel's cache, if they work there. It is empty afterwards too.

    A trial writes and reads one aligned block; if it fails with EINVAL, the next larger alignment is tried.

    Returns:
        Alignment in bytes, at least a page, that memory, offsets and sizes need; 0 where no alignment works, and the
        descriptor is then as it was.

    Raises:
        OSError: the trial failed otherwise: there is no room, or the disk is bad.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    alignment = PAGE
    while alignment <= MOST_ALIGNMENT:
        if _works(descriptor, alignment):
            return alignment
        alignment *= 2
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return 0


def _works(descriptor: int, alignment: int) -> bool:
    """Whether a block is written, and read again at memory that is aligned to ``alignment`` and to no more."""
    pages = mmap.mmap(-1, 4 * alignment)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % (2 * alignment) + alignment
    block = memoryview(pages)[start : start + alignment]
    text = bytes(range(256)) * (alignment // 256)
    block[:] = text
    try:
        written = os.pwritev(descriptor, [block], 0)
        block[:] = bytes(alignment)
        read = os.preadv(descriptor, [block], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.ftruncate(descriptor, 0)
    return written == read == alignment and block == text


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that ``path`` lies on, such as ``ext4`` or ``lustre``; empty where nobody says.

    ``mounts``: the text of /proc/self/mounts; None reads it.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
        except OSError:
            return ""
    real = path.resolve()
    found = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    around = [(len(Path(at).parts), kind) for at, kind in found if real.is_relative_to(at)]
    return max(around, key=lambda entry: entry[0], default=(0, ""))[1]


# Stripes: over how many storage targets a Lustre file system spreads the files of a folder.
#
# The layout of a file is settled when it is made, and is that of its folder. On other file systems ``lfs`` refuses, and
# where there is no ``lfs`` nothing is called.

ALL = -1  # storage targets
SIZE_NBYTES = 16 * 2**20  # of a stripe: what a rank writes at once is contiguous, and longer
LIMIT_S = 60.0


@dataclass(frozen=True)
class Striping:
    """Layout of files that are made in a folder.

    Attributes:
        count: storage targets of one file, of a file as large as can be where that depends on it; ALL: every one.
        size_nbytes: bytes on one target before the next one's turn; 0 where nobody says.
    """

    count: int
    size_nbytes: int


def striping_of(folder: Path) -> Striping | None:
    """Layout of files that will be made in ``folder``; None where it is not on Lustre, or there is no ``lfs``.

    Args:
        folder: need not exist; then its nearest parent that does says it.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    done = _lfs("getstripe", "-d", str(there))
    if done is None or done.returncode:
        return None
    counts = re.findall(r"stripe_count:\s*(-?\d+)", done.stdout)
    sizes = re.findall(r"stripe_size:\s*(\d+)", done.stdout)
    if not counts:
        return None
    # Of a layout that grows with the file the last part is that of large files. 0: the file system's default, 1.
    return Striping(int(counts[-1]) or 1, int(sizes[-1]) if sizes else 0)


def stripe(folder: Path, count: int) -> None:
    """Have files that will be made in ``folder``, which is made too, spread over ``count`` storage targets, or ALL.

    Raises:
        ConfigError: ``folder`` is not on Lustre, or the file system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _lfs("setstripe", "-c", str(count), "-S", str(SIZE_NBYTES), str(folder))
    if done is None or done.returncode:
        said = (
            "there is no lfs on this host" if done is None else f"lfs said: {done.stderr.strip()}"
        )
        raise ConfigError(
            f"checkpoint.stripes: got {count}, but {folder} cannot be striped: {said}. Leave it at 0 where the folder "
            f"is not on Lustre, or type on a login node: {command(folder, count)}"
        )


def command(folder: Path, count: int) -> str:
    """What to type for ``stripe``."""
    return f"lfs setstripe -c {count} -S {SIZE_NBYTES // 2**20}M {folder}"


def _lfs(*words: str) -> subprocess.CompletedProcess[str] | None:
    """``lfs words...``; None where there is none, or a server does not answer it."""
    return answer(["lfs", *words], LIMIT_S)
