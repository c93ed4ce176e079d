"""The HDF5 file of a checkpoint: made by one rank, filled by all.

Rank 0 alone makes groups, attributes, small tables and datasets with the serial driver. All bytes of datasets are
allocated then, and none is filled. Afterwards all ranks write bytes, through MPI-IO or at offsets; both ways leave the
same file to the byte. Collective metadata, which hangs and corrupts in several releases of HDF5, is never used.

[Note: Made in memory]
HDF5 1.10 crashes the process when it closes a file that it could not write, as on a full disk. It therefore writes to
memory, and we copy the result to the disk. That copy fails as any write does.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpczero.checkpoint.disk.format import FORMAT, VERSION, Dataset, Table
from hpczero.files.direct import read_at, write_at, written_spans

ALIGNMENT = 2**20  # of datasets in the file: whole stripes of parallel file systems
NAME_NBYTES = 256
MOST_DIMS = 8

Array = npt.NDArray[Any]


def create(
    path: Path, datasets: Sequence[Dataset], table: Table, meta: Mapping[str, Any], *, step: int
) -> tuple[list[Dataset], bool]:
    """Make the file with everything in it but the content of ``datasets``. Not collective: one rank calls it.

    Returns:
        ``datasets`` with their places in the file, and whether the file system keeps room for all of it.

    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    # See [Note: Made in memory].
    with open(os.memfd_create(path.name), "w+b", buffering=0) as image:
        with h5py.File(
            image,
            "w",
            libver=("v110", "v110"),  # checksums in superblock and headers
            alignment_threshold=ALIGNMENT,  # not of small ones: a file of a tiny model stays tiny
            alignment_interval=ALIGNMENT,
        ) as file:
            file.attrs.update({"format": FORMAT, "format_version": VERSION, "step": step})
            file.attrs["meta"] = json.dumps(meta)
            _write_table(file.create_group("params"), table)
            for dataset in datasets:
                _allocate(file, dataset)
            file.flush()
            placed = [
                replace(dataset, offset=file[dataset.name].id.get_offset() or 0)
                for dataset in datasets
            ]
        _copy(image.fileno(), path)
    return placed, _reserve(path)


def _copy(image: int, path: Path) -> None:
    with path.open("xb", buffering=0) as file:
        file.truncate(os.fstat(image).st_size)
        for start, stop in written_spans(image):
            write_at(file.fileno(), start, read_at(image, start, stop - start))


def _allocate(file: h5py.File, dataset: Dataset) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # the same state is the same file, whenever it is saved
    space = h5py.h5s.create_simple((dataset.numel,))
    kind = h5py.h5t.py_create(np.dtype(dataset.dtype), logical=True)
    parent, _, leaf = dataset.name.rpartition("/")
    group = file.require_group(parent or "/")
    h5py.h5d.create(group.id, leaf.encode(), kind, space, creation).close()


def _write_table(group: h5py.Group, table: Table) -> None:
    """The parameter table for readers of HDF5; fixed-length strings, one element for each row."""
    rows = table.rows
    shapes = np.zeros((len(rows), MOST_DIMS), dtype=np.uint64)
    for index, row in enumerate(rows):
        shapes[index, : min(len(row.shape), MOST_DIMS)] = row.shape[:MOST_DIMS]
    ties = [-1 if row.tied_to is None else row.tied_to for row in rows]
    for name, dtype, column in (
        ("name", f"S{NAME_NBYTES}", [row.name.encode()[:NAME_NBYTES] for row in rows]),
        ("offset", np.uint64, [row.offset for row in rows]),
        ("numel", np.uint64, [row.numel for row in rows]),
        ("ndim", np.uint8, [len(row.shape) for row in rows]),
        ("shape", np.uint64, shapes),
        ("group", np.int16, [row.group for row in rows]),
        ("frozen", np.uint8, [row.frozen for row in rows]),
        ("tied_to", np.int64, ties),
    ):
        group.create_dataset(name, data=np.array(column, dtype=dtype))


def _reserve(path: Path) -> bool:
    """Have the file system give the blocks now, so that a full disk is an error here. Returns whether it could."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b", buffering=0) as file:
        if not fallocate(file.fileno(), 0, 0, path.stat().st_size):
            return True
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(code, os.strerror(code), str(path))
    return False
