"""Files past the kernel's cache: what a file system wants of memory and offsets, and which one a folder lies on.

Owns: O_DIRECT and its alignment. Must not know: torch, MPI, what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE
MOST_ALIGNMENT = 2**20
# linux/stat.h and linux/fcntl.h
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000
_STATX_NBYTES, _MASK_AT, _MEMORY_AT, _OFFSET_AT = 256, 0, 152, 156


def open_direct(path: Path) -> int | None:
    """A descriptor whose writes go past the kernel's cache; None where the file system has none such."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def make_direct(descriptor: int) -> int:
    """Switch an open, empty file to calls past the kernel's cache, if they work there. It is empty afterwards too.

    The kernel is asked (``statx``, since Linux 6.1), and then believed only after a trial: a write and a read of one
    aligned block. A trial that fails with EINVAL is tried again with the next larger alignment.

    Returns:
        Alignment in bytes, at least a page, that memory, offsets and sizes need; 0 where no alignment works, and the
        descriptor is then as it was.

    Raises:
        OSError: the trial failed otherwise: there is no room, or the disk is bad.
    """
    told = _told_alignment(descriptor)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if told == 0:
        return 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    alignment = max(PAGE, told or 0)
    while alignment <= MOST_ALIGNMENT:
        if _works(descriptor, alignment):
            return alignment
        alignment *= 2
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return 0


def _told_alignment(descriptor: int) -> int | None:
    """What ``statx`` says; 0: no direct calls to this file; None: it says nothing."""
    call = getattr(ctypes.CDLL(None), "statx", None)
    if call is None:
        return None
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if call(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
        return None
    mask, memory, offset = (
        int.from_bytes(found.raw[at : at + 4], "little")
        for at in (_MASK_AT, _MEMORY_AT, _OFFSET_AT)
    )
    if not mask & _STATX_DIOALIGN:
        return None
    return max(memory, offset) if memory and offset else 0


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
