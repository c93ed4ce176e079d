"""Writing a checkpoint: the order of a save, which ends in a whole checkpoint or in none, on all ranks alike.

    room? | hidden folder, file made by rank 0 | rounds: shards to slabs, digest, write | close, fsync
          | digests to rank 0, manifest | rename | retention

Every stage ends in an agreement. If a stage fails on any rank, all ranks raise the same error. What was written by then
is a hidden folder, which does not count as a checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from typing_extensions import override

from hpczero.checkpoint.disk import h5file
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import STATE_FILE, Dataset, digest
from hpczero.checkpoint.disk.lines import strangers
from hpczero.checkpoint.disk.rawfile import manifest_of, start_writeback, write_direct
from hpczero.checkpoint.exchange import DatasetExchange
from hpczero.checkpoint.snapshot import DatasetPart, Snapshot
from hpczero.errors import CheckpointError, CheckpointNotWritten, ConfigError, is_out_of_memory
from hpczero.files.direct import filesystem_of, open_direct, write_at
from hpczero.job.topology import Topology, before_finalize
from hpczero.options.environment import Environment

# A save on a thread.
#
# [Note: No join]
# An exception of a signal handler in ``Thread.join`` has Python 3.11 take the thread for ended (bpo-45274), also when
# the interpreter ends. Who waits here waits for a future.

logger = logging.getLogger("hpczero.checkpoint")

_begun: set[Future[Path]] = set()  # all writes under way
_left: list[Future[None]] = []  # the ends of writes that nobody waits for


class BackgroundWrite:
    """One write on a thread, over a communicator of its own."""

    def __init__(self, topology: Topology) -> None:
        """Not collective."""
        self._topology = topology
        self._own: Topology | None = None
        self._write: Future[Path] | None = None  # until it is finished; see [Note: No join]
        self._end: Future[None] | None = None  # of a write that was left
        self._told = False  # of its error

    @property
    def busy(self) -> bool:
        """Whether a write has been started and not been finished."""
        return self._write is not None

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for on this rank."""
        return self._write is not None and self._write.done()

    def start(self, work: Callable[[Topology], Path]) -> None:
        """Start a write. Collective over world the first time."""
        if self._own is None:
            self._own = replace(self._topology, world=self._topology.world.beside())
            atexit.register(self._tell_unheard)
        own, write = self._own, Future[Path]()
        self._write, self._end, self._told = write, None, False
        _begun.add(write)
        write.add_done_callback(_begun.discard)
        before_finalize(_wait_for_begun)  # HDF5 is loaded by now
        # Not a daemon: a program that ends without ``close`` still ends with a whole checkpoint.
        thread = threading.Thread(target=settle, args=(write, work, own), name="hpczero-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give; peers are in the write
            settle(write, work, own)

    def leave(self, then: Callable[[], None]) -> None:
        """Go on without a caller who waits; ``then`` is called at the end. Not collective.

        Peers write their parts on threads too, so the write ends as long as they live. The communicator is not freed.
        """
        assert self._write is not None, "busy"
        over = self._end = Future[None]()
        _left.append(over)

        def end(write: Future[Path]) -> None:
            self._warn("when an exception came")
            settle(over, then)

        self._write.add_done_callback(end)

    def _warn(self, when: str) -> None:
        error = self._write.exception() if self.done and self._write is not None else None
        if error is not None and not self._told and self._own is not None and self._own.is_root:
            logger.warning("the save in flight %s has failed: %s", when, error)
        self._told = True

    def _tell_unheard(self) -> None:
        self._warn("when the program ended")

    def finish(self) -> Path:
        """Wait for the thread of this rank. Not collective, but the thread's work is.

        Raises:
            CheckpointError: what the write raised.
        """
        assert self._write is not None, "busy"
        error = self._write.exception()
        if self._end is not None:
            self._end.exception()
        write, self._write = self._write, None
        if isinstance(error, CheckpointError):
            raise type(error)(str(error)) from error
        return write.result()

    def close(self) -> None:
        """Free the communicator, once nothing is written. Collective over world."""
        if self._own is not None:
            atexit.unregister(self._tell_unheard)
            self._own.world.comm.Free()
            self._own = None


def settle(future: Future[Any], work: Callable[..., Any], *args: Any) -> None:
    """Give ``future`` what ``work(*args)`` returns or raises."""
    try:
        future.set_result(work(*args))
    except BaseException as error:
        future.set_exception(error)


def wait_for_left() -> None:
    """Return when all writes that were left are done or have failed. Not collective."""
    while _left:
        _left[-1].exception()
        _left.pop()


def _wait_for_begun(begun: set[Future[Path]] = _begun) -> None:  # names of the module may be gone
    for write in list(begun):
        write.exception()


# Two ways to fill the datasets of a checkpoint's file from all ranks: through MPI-IO, or at offsets (h5file.py: [Note:
# One rank makes the file]).

Array = npt.NDArray[Any]


class Writer:
    """Fills datasets of a file that ``h5file.create`` made."""

    def __init__(self, path: Path) -> None:
        """Open the file on this rank. Not collective: one rank may fail alone."""
        self._descriptor = os.open(path, os.O_RDWR)

    def join(self, comm: MPI.Intracomm) -> None:
        """Do what all ranks must do together before the first write, once each has opened the file.

        Collective over ``comm``, which is borrowed.
        """

    def write(self, dataset: Dataset, start: int, data: Array) -> None:
        """Write elements of ``dataset`` from ``start`` on; none is allowed.

        All ranks make the same number of calls in the same order. ``data`` belongs to the writer from then on.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Return when everything is on the disk. Collective."""
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Give up without a collective call, after something failed here or on another rank."""
        # Once: the number may be that of another thread's file by now.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class MpioWriter(Writer):
    """h5py's ``mpio`` driver: collective MPI-IO. The descriptor is of this node's cache of the file."""

    @override
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path

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
        super().close()  # HDF5 writes again after its own sync


class PosixWriter(Writer):
    """``pwrite`` at the offsets of the datasets, past the kernel's cache where the file system allows it.

    A thread writes one piece at a time, while the caller makes the next piece: file systems let one rank at a time
    write to a file. The next call raises an error of the write. The thread is a plain one: executors take no more work
    once the program's last line is done, when a save in the background may still be under way.
    """

    @override
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct = open_direct(path)
        self._thread: threading.Thread | None = None  # of the last piece
        self._last: Future[None] | None = None  # until somebody has waited for it

    @override
    def write(self, dataset: Dataset, start: int, data: Array) -> None:
        self._wait()
        last: Future[None] = Future()
        work = (last, self._write, dataset.offset + start * dataset.itemsize, data)
        self._last = last
        self._thread = threading.Thread(target=settle, args=work, name="hpczero-pwrite")
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had; from Python 3.12 on also after the last line
            self._thread = None
            settle(*work)

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
        super().close()

    @override
    def abandon(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)
        super().abandon()


def _writes_wrong_bytes() -> bool:
    """Whether this is OMPIO of an Open MPI that corrupts parallel HDF5 (open-mpi/ompi#12718, up to 4.1.6 and 5.0.5)."""
    vendor, version = MPI.get_vendor()
    if vendor != "Open MPI" or version >= (5, 0, 6) or (4, 1, 7) <= version < (5, 0, 0):
        return False
    choice = Environment.read().mpi_io
    return not (choice.startswith("romio") or (choice.startswith("^") and "ompio" in choice))


# File systems that serve many nodes, by their names in /proc/mounts.
PARALLEL = {"lustre", "gpfs", "beegfs", "panfs", "pvfs2", "orangefs"}
PARALLEL |= {"daos", "fuse.daos", "wekafs", "ceph"}

WRITERS: dict[str, type[Writer]] = {"mpio": MpioWriter, "posix": PosixWriter}


def automatic(file: Path, *, reserved: bool) -> str:
    """What ``auto`` means for an existing ``file``. Not collective: one rank asks.

    It is MPI-IO if MPI-IO knows the file system and is safe there: it may hang if the disk fills up in the middle of a
    write, so all room must be ``reserved``. On other file systems MPI-IO takes several times as long as ``posix``
    (docs/performance.md).
    """
    fits = bool(h5py.get_config().mpi) and reserved and filesystem_of(file) in PARALLEL
    return "mpio" if fits and not _writes_wrong_bytes() else "posix"


def writer_for(name: str) -> type[Writer]:
    """The writer called ``mpio`` or ``posix``. Raises CheckpointError: ``mpio`` with an h5py that does not have it."""
    if name == "mpio" and not h5py.get_config().mpi:
        raise CheckpointError(
            "h5py was built without MPI, so there is no mpio writer; build it against parallel HDF5 (docs/install.md), "
            "or use the posix writer, which makes the same file"
        )
    return WRITERS[name]


Milestone = Callable[[str], None]


def write(
    snapshot: Snapshot,
    folder: Folder,
    topology: Topology,
    *,
    writer: str = "auto",
    keep: int | None = None,
    at: Milestone = lambda name: None,
    still_ours: Callable[[], None] = lambda: None,
    lineage: Mapping[Path, int] = MappingProxyType({}),
) -> Path:
    """Write and commit a checkpoint. Collective over topology.world.

    Args:
        snapshot: of all ranks.
        folder: equal on all ranks; locked by the caller.
        topology: its ``world`` carries nothing else meanwhile.
        writer: ``mpio``, ``posix`` or ``auto``.
        keep: newest checkpoints that stay; None removes none.
        at: called with the name of every milestone; tests end the process there.
        still_ours: raises if the lock on the folder was lost. Rank 0 calls it before the commit.
        lineage: that of the model when the snapshot was taken. Checkpoints of another line go to the side.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointNotWritten: on every rank. Older checkpoints are as they were.
    """
    temporary: Path | None = None
    try:
        with stage(topology, "prepare the checkpoint"):
            if writer != "auto":
                writer_for(writer)  # refuses what cannot be
            text = ""
            if topology.is_root:
                folder.check_room(snapshot.nbytes)
                temporary = folder.begin(snapshot.step)
                at("begun")
                text = json.dumps([str(temporary), *_create_file(snapshot, temporary, writer)])
                at("created")
        path, writer, entries = json.loads(topology.broadcast_text(text))
        temporary = Path(path)
        placed = [Dataset(**{**entry, "digests": ()}) for entry in entries]
        parts = [replace(part, dataset=d) for part, d in zip(snapshot.parts, placed, strict=True)]
        written = write_parts(parts, temporary / STATE_FILE, topology, writer_for(writer), at)
        with stage(topology, "commit the checkpoint"):
            target = folder.path
            if topology.is_root:
                manifest = manifest_of(
                    temporary / STATE_FILE,
                    written,
                    step=snapshot.step,
                    world_size=snapshot.world_size,
                    table=snapshot.table,
                    meta=snapshot.meta,
                )
                at("digested")
                still_ours()
                others = strangers(
                    folder.candidates(),
                    step=snapshot.step,
                    origin=lineage.get(folder.path.resolve()),
                    keep=keep,
                )
                target = folder.commit(temporary, manifest, others=others, at=at)
                at("committed")
        target = Path(topology.broadcast_text(str(target)))
    except BaseException:
        if topology.is_root and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if topology.is_root and keep is not None:
        folder.retain(keep, target)
        at("retained")
    return target


def _create_file(snapshot: Snapshot, folder: Path, writer: str) -> tuple[str, list[dict[str, Any]]]:
    """Create the state file, on rank 0. Returns the writer's name, ``auto`` resolved, and where each dataset lies."""
    datasets, reserved = h5file.create(
        folder / STATE_FILE,
        [part.dataset for part in snapshot.parts],
        snapshot.table,
        snapshot.meta,
        step=snapshot.step,
    )
    if writer == "auto":
        writer = automatic(folder / STATE_FILE, reserved=reserved)
    return writer, [asdict(dataset) for dataset in datasets]


def write_parts(
    parts: list[DatasetPart],
    path: Path,
    topology: Topology,
    kind: Callable[[Path], Writer],
    at: Milestone = lambda name: None,
) -> list[Dataset]:
    """Fill the datasets, and return them with their digests, complete on rank 0. Collective over world.

    ``kind`` makes the writer of the file ``path``; ``at`` is told of milestones.

    Raises:
        CheckpointNotWritten: on every rank.
    """
    writer: Writer | None = None
    mine: list[list[str]] = []
    try:
        # Two stages: a rank that cannot open it must not leave the others waiting in MPI-IO.
        with stage(topology, "open the file"):
            writer = kind(path)
        with stage(topology, "join in", collective="opening the file"):
            writer.join(topology.world.comm)
        for part in parts:
            dataset = part.dataset
            with stage(topology, f"read {dataset.name} out of the model"):
                held = part.values()
            exchange = DatasetExchange(topology.world.comm, topology.watchdog, part.held)
            digests: list[str] = []
            for windows in exchange.rounds(dataset):
                window = windows[topology.rank]
                # Before ranks wait for one another: what rests on a tier may be lost on one of them.
                with stage(topology, f"read {dataset.name} out of the model"):
                    values = [held[place] for place in exchange.places(windows)]
                slabs = exchange.to_slabs(values, windows).numpy()
                del values
                data = slabs if dataset.dtype != "|u1" else slabs.astype(np.uint8, copy=False)
                what = f"write {dataset.name}"
                with stage(topology, what, collective=f"writing {dataset.name}"):
                    for start in range(0, len(data), dataset.slab_numel):
                        digests.append(digest(data[start : start + dataset.slab_numel]))
                    writer.write(dataset, window.start, data)
            del held  # with windows of a tier
            mine.append(digests)
            at(f"wrote {dataset.name}")
        with stage(topology, "close it", collective="closing the file"):
            writer.close()
        at("closed")
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.abandon()
        raise
    with topology.watchdog.collective("checkpoint: collecting digests"):
        everybody = topology.world.comm.gather(mine)
    if everybody is None:
        return [part.dataset for part in parts]
    return [
        replace(part.dataset, digests=tuple(value for rank in everybody for value in rank[place]))
        for place, part in enumerate(parts)
    ]


@contextlib.contextmanager
def stage(topology: Topology, what: str, *, collective: str = ""):  # type: ignore[no-untyped-def]  # as agreed
    """``topology.agreed``, in which an error of the system becomes a CheckpointNotWritten."""
    with contextlib.ExitStack() as stack:
        if collective:
            stack.enter_context(topology.watchdog.collective(f"checkpoint: {collective}"))
        stack.enter_context(topology.agreed(what))
        try:
            yield
        # The last: of a folder that cannot be read.
        except (OSError, RuntimeError, MemoryError, ConfigError) as error:
            if isinstance(error, CheckpointError):
                raise
            remedy = "Check space, quota and permissions"
            if is_out_of_memory(error):
                remedy = "Memory is short, not the disk: a save needs room for one more state of the optimizer"
            raise CheckpointNotWritten(
                f"{error}; older checkpoints are as they were. {remedy}"
            ) from error
