"""Bytes at offsets of a file, and the digest of those that no dataset has."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from hpczero.checkpoint.disk.format import Dataset, Manifest, now
from hpczero.files.direct import PAGE, read_at
from hpczero.files.regular import opened

COPY_NBYTES = 2**22
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

Array = npt.NDArray[Any]


def write_direct(descriptor: int, offset: int, data: Array) -> int:
    """As much of ``data`` as can go past the kernel's cache: whole pages, if memory and place are aligned to them.

    Returns:
        Bytes that are written; the caller writes the rest.
    """
    if offset % PAGE or data.__array_interface__["data"][0] % PAGE:
        return 0
    flat, done = data.data.cast("B"), 0
    whole = len(flat) // PAGE * PAGE
    while done < whole:
        try:
            count = os.pwrite(descriptor, flat[done : min(whole, done + 2**30)], offset + done)
        except OSError as error:
            if error.errno == errno.EINVAL:  # this file system wants more than pages
                break
            raise
        done += count // PAGE * PAGE
        if count % PAGE or not count:
            break
    return done


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to put these bytes on the disk, where it can, so that a later fsync waits less."""
    call = ctypes.CDLL(None).sync_file_range
    if nbytes:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        call(descriptor, offset, nbytes, SYNC_FILE_RANGE_WRITE)  # a hint: errors show in fsync


def manifest_of(state: Path, datasets: Sequence[Dataset], **others: Any) -> Manifest:
    """The manifest of the file ``state``, as it lies on the disk; ``others`` are fields that the file does not say."""
    nbytes, rest = state.stat().st_size, rest_digest(state, datasets)
    return Manifest(
        created=now(), datasets=tuple(datasets), file_nbytes=nbytes, rest=rest, **others
    )


def rest_digest(path: Path, datasets: Sequence[Dataset]) -> str:
    """Digest of every byte of the file that lies in none of ``datasets``: what HDF5 itself needs."""
    state = xxhash.xxh3_64()
    with opened(path) as descriptor:
        for start, stop in _gaps(os.fstat(descriptor).st_size, datasets):
            for begin in range(start, stop, COPY_NBYTES):
                state.update(read_at(descriptor, begin, min(COPY_NBYTES, stop - begin)).data)
    return str(state.hexdigest())


def _gaps(nbytes: int, datasets: Sequence[Dataset]) -> Iterator[tuple[int, int]]:
    begin = 0
    for dataset in sorted((d for d in datasets if d.nbytes), key=lambda d: d.offset):
        yield begin, dataset.offset
        begin = dataset.offset + dataset.nbytes
    yield begin, nbytes
