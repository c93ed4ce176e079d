"""Two ways to fill the datasets of a checkpoint's file from all ranks.

Owns: MPI-IO and its traps. Must not know: what the file has, the order of a save (h5file.py: [Note: One rank makes the
file]).
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from typing_extensions import override

from hpczero.checkpoint.disk.format import Dataset
from hpczero.checkpoint.disk.rawfile import start_writeback, write_at, write_direct
from hpczero.errors import CheckpointError
from hpczero.files.direct import filesystem_of, open_direct
from hpczero.options.environment import Environment

Array = npt.NDArray[Any]


class Writer(ABC):
    """Fills datasets of a file that ``create`` made."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open the file on this rank. Not collective: one rank may fail alone."""

    def join(self, comm: MPI.Intracomm) -> None:
        """Do what all ranks must do together before the first write, once each has opened the file.

        Collective over ``comm``, which is borrowed.
        """
        return

    @abstractmethod
    def write(self, dataset: Dataset, start: int, data: Array) -> None:
        """Write elements of ``dataset`` from ``start`` on; none is allowed.

        All ranks make the same number of calls in the same order. ``data`` belongs to the writer from then on.
        """

    @abstractmethod
    def close(self) -> None:
        """Return when everything is on the disk. Collective."""

    def abandon(self) -> None:
        """Give up without a collective call, after something failed here or on another rank."""
        return


class MpioWriter(Writer):
    """h5py's ``mpio`` driver: collective MPI-IO."""

    @override
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)  # of this node's cache of the file

    @override
    def join(self, comm: MPI.Intracomm) -> None:
        # Never closed after an error: HDF5 would call MPI-IO collectively, which hangs or crashes.
        self._file = h5py.File(self._path, "r+", driver="mpio", comm=comm, libver=("v110", "v110"))
        self._transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        self._transfer.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)

    @override
    def write(self, dataset: Dataset, start: int, data: Array) -> None:
        found = self._file[dataset.name].id
        there, here = found.get_space(), h5py.h5s.create_simple((max(len(data), 1),))
        if len(data):
            there.select_hyperslab((start,), (len(data),))
        else:  # a rank that writes nothing takes part all the same
            there.select_none()
            here.select_none()
        source = data if len(data) else np.empty(1, dtype=dataset.dtype)
        found.write(here, there, source, dxpl=self._transfer)
        offset = dataset.offset + start * dataset.itemsize
        start_writeback(self._descriptor, offset, data.nbytes)

    @override
    def close(self) -> None:
        self._file.flush()
        self._file.close()
        os.fsync(self._descriptor)  # HDF5 writes again after its own sync
        self.abandon()

    @override
    def abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PosixWriter(Writer):
    """``pwrite`` at the offsets of the datasets: no MPI-IO, and any thread may call it.

    It writes on a thread of its own, one piece at a time, while the caller makes the next piece. File systems let one
    rank at a time write to a file, and the others need not wait for that. The next call raises an error of the write.
    Whole pages go past the kernel's cache if the file system allows it; docs/performance.md has the gain.

    The thread is a plain one: executors take no more work once the program's last line is done, when a save in the
    background may still be under way.
    """

    @override
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR)
        self._direct = open_direct(path)
        self._thread: threading.Thread | None = None  # of the last piece
        self._last: Future[None] | None = None  # until somebody has waited for it

    @override
    def write(self, dataset: Dataset, start: int, data: Array) -> None:
        self._wait()
        offset = dataset.offset + start * dataset.itemsize
        self._last = Future()
        self._thread = threading.Thread(
            target=self._settle, args=(self._last, offset, data), name="hpczero-pwrite"
        )
        try:
            self._thread.start()
        except (
            RuntimeError
        ):  # the system gives no thread; from Python 3.12 on also after a program's last line
            self._thread = None
            self._settle(self._last, offset, data)

    def _settle(self, written: Future[None], offset: int, data: Array) -> None:
        try:
            self._write(offset, data)
        except BaseException as error:  # raised by ``_wait``
            written.set_exception(error)
        else:
            written.set_result(None)

    def _write(self, offset: int, data: Array) -> None:
        done = 0 if self._direct is None else write_direct(self._direct, offset, data)
        if done < data.nbytes:
            rest = data.view(np.uint8)[done:]
            write_at(self._descriptor, offset + done, rest)
            start_writeback(self._descriptor, offset + done, rest.nbytes)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    @override
    def close(self) -> None:
        self._wait()
        os.fsync(self._descriptor)
        self.abandon()

    @override
    def abandon(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        # Once: the number may be that of another thread's file by now.
        descriptors, self._descriptor, self._direct = [self._descriptor, self._direct], -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _writes_wrong_bytes() -> bool:
    """Whether MPI-IO is the OMPIO of an Open MPI that can silently corrupt what parallel HDF5 writes.

    Source: open-mpi/ompi#12718; repaired in 4.1.7 and 5.0.6.
    """
    vendor, version = MPI.get_vendor()
    if vendor != "Open MPI" or version >= (5, 0, 6) or (4, 1, 7) <= version < (5, 0, 0):
        return False
    choice = Environment.read().mpi_io
    return not (choice.startswith("romio") or (choice.startswith("^") and "ompio" in choice))


# File systems that serve many nodes, by their names in /proc/mounts.
PARALLEL = frozenset(
    {
        "lustre",
        "gpfs",
        "beegfs",
        "panfs",
        "pvfs2",
        "orangefs",
        "daos",
        "fuse.daos",
        "wekafs",
        "ceph",
    }
)

WRITERS: dict[str, type[Writer]] = {"mpio": MpioWriter, "posix": PosixWriter}


def automatic(file: Path, *, reserved: bool) -> str:
    """What ``auto`` means for ``file``. Not collective: one rank asks.

    It is MPI-IO if MPI-IO knows the file system and is safe there. It then locks and cuts by the file system's own
    stripes. It is not safe if the disk may fill up in the middle of a write: it may hang then. On file systems that it
    does not know it does what ``posix`` does, through the kernel's cache, and takes several times as long
    (docs/performance.md).

    Args:
        file: exists.
        reserved: whether the file system keeps room for all of it.
    """
    fits = bool(h5py.get_config().mpi) and reserved and filesystem_of(file) in PARALLEL
    return "mpio" if fits and not _writes_wrong_bytes() else "posix"


def writer_for(name: str) -> type[Writer]:
    """The writer called ``mpio`` or ``posix``.

    Raises:
        CheckpointError: ``mpio`` with an h5py that does not have it.
    """
    if name == "mpio" and not h5py.get_config().mpi:
        raise CheckpointError(
            "h5py was built without MPI, so there is no mpio writer; build it against parallel HDF5 (docs/install.md), "
            "or use the posix writer, which makes the same file"
        )
    return WRITERS[name]
