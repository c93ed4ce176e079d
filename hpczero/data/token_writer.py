"""Writing a token file: whole or not at all.

Owns: the order of writing, and what HDF5 is given to write to. Must not know: where text comes from, batches, MPI.

[Note: HDF5 never sees a disk that is full]
HDF5 1.10 crashes the process when it closes a file that it could not write. It therefore writes to an object of ours,
which keeps the first error and tells HDF5 that all is well. We raise the error afterwards and remove the file, because
nothing that came after the error is of use.

[Note: Where a chunk lies]
HDF5 1.10 finds the place of one chunk by walking over all of them, which takes hours for a large file. The object that
HDF5 writes to therefore remembers the place of the last write. The slab is read back from there before the place is
trusted.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpczero.data import appendix
from hpczero.data.appendix import FORMAT, SPLITS, VERSION, Description, SplitPart
from hpczero.data.slabs import check_ids
from hpczero.data.tokenize import Tokenizer
from hpczero.errors import DataError
from hpczero.files.regular import reason

if TYPE_CHECKING:
    import h5py

SLAB_NUMEL = 2**15  # of one digest and of one chunk of HDF5 (docs/performance.md)
WRITE_SLABS = 32
STALE_S = 3600.0  # since it was last written to: nobody writes it any more


class _Disk(io.RawIOBase):
    """The file as HDF5 sees it ([Note: HDF5 never sees a disk that is full])."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._place = 0
        self.last = 0  # place of the last write
        self.error: OSError | None = None

    def check(self) -> None:
        """Raise OSError if something could not be written."""
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        nbytes, place = len(left), self._place
        self._place, self.last = place + nbytes, place
        try:
            while left and self.error is None:
                written = os.pwrite(self._descriptor, left, place)
                left, place = left[written:], place + written
        except OSError as error:
            self.error = error
        return nbytes

    def read_at(self, place: int, nbytes: int) -> bytes:
        """What the file has there."""
        return os.pread(self._descriptor, nbytes, place)

    def readinto(self, into: Any) -> int:
        left = memoryview(into).cast("B")
        data = self.read_at(self._place, len(left))
        left[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset += os.fstat(self._descriptor).st_size
        self._place = offset if whence != os.SEEK_CUR else self._place + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def truncate(self, nbytes: int | None = None) -> int:
        nbytes = self._place if nbytes is None else nbytes
        try:
            os.ftruncate(self._descriptor, nbytes)
        except OSError as error:
            self.error = self.error or error
        return nbytes

    def flush(self) -> None:
        pass


class SplitWriter:
    """Appends documents to one split of a file that is being written, in large writes."""

    def __init__(self, file: h5py.File, name: str, tokenizer: Tokenizer, disk: _Disk) -> None:
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._group = file.create_group(name)
        self._tokens = self._group.create_dataset(
            "tokens", shape=(0,), maxshape=(None,), chunks=(SLAB_NUMEL,), dtype=self._dtype
        )
        self._name = name
        self._tokenizer = tokenizer
        self._disk = disk
        self._pending: list[npt.NDArray[np.generic]] = []
        self._pending_numel = 0
        self._numel = 0
        self._slabs: list[tuple[int, int]] = []  # place, digest
        self._documents = 0
        self._text_nbytes = 0

    def end_document(self) -> None:
        """Add the separator to end a document."""
        self.append_ids(np.array([self._tokenizer.separator]))
        self._documents += 1

    def append_ids(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Add tokens.

        Raises:
            DataError: ids are not of the vocabulary.
            OSError: they cannot be written.
        """
        what = f"/{self._name}/tokens"
        check_ids(ids, self._tokenizer.vocab_size, what)
        if ids.size and int(ids.min()) < 0:
            raise DataError(f"{what} would hold token id {int(ids.min())}, expected 0 or above")
        self._pending.append(ids.astype(self._dtype))
        self._pending_numel += len(ids)
        if self._pending_numel >= WRITE_SLABS * SLAB_NUMEL:
            self._flush(self._pending_numel // SLAB_NUMEL * SLAB_NUMEL)

    def count(self, documents: int, text_nbytes: int) -> None:
        """Count what ``append_ids`` cannot: documents and bytes of text."""
        self._documents += documents
        self._text_nbytes += text_nbytes

    def finish(self) -> tuple[SplitPart, appendix.Table]:
        """Write what is pending, and the counts. The file is flushed afterwards.

        Raises:
            DataError: the split has no token.
            OSError: it cannot be written.
        """
        self._flush(self._pending_numel)
        if not self._numel:
            raise DataError(
                f"/{self._name}/tokens would have no token; was there enough text for both splits?"
            )
        self._group.attrs.update({"documents": self._documents, "text_nbytes": self._text_nbytes})
        self._group.file.flush()
        self._disk.check()
        table = np.array(self._slabs, dtype="<u8")
        part = SplitPart(
            dtype=self._dtype.name,
            numel=self._numel,
            slab_numel=SLAB_NUMEL,
            documents=self._documents,
            text_nbytes=self._text_nbytes,
            table=appendix.table_digest(table),
        )
        return part, table

    def _flush(self, numel: int) -> None:
        """Write the first ``numel`` pending tokens. They are whole slabs, except at the end."""
        if not numel:
            return
        data = np.concatenate(self._pending)
        self._pending = [data[numel:].copy()]
        self._pending_numel -= numel
        data = data[:numel].astype(self._dtype.newbyteorder("<"), copy=False)
        self._tokens.resize(self._numel + numel, axis=0)
        for begin in range(0, numel, SLAB_NUMEL):
            self._write_slab(data[begin : begin + SLAB_NUMEL])
        self._disk.check()

    def _write_slab(self, slab: npt.NDArray[Any]) -> None:
        chunk = np.zeros(SLAB_NUMEL, dtype=slab.dtype)
        chunk[: len(slab)] = slab
        self._tokens.id.write_direct_chunk((self._numel,), chunk)
        digest = appendix.digest(slab)
        place = self._disk.last
        # See [Note: Where a chunk lies].
        if self._disk.read_at(place, slab.nbytes) != slab.tobytes():
            self._disk.check()
            place = self._tokens.id.get_chunk_info_by_coord((self._numel,)).byte_offset
        self._slabs.append((place, digest))
        self._numel += len(slab)


@contextmanager
def create(
    path: Path,
    tokenizer: Tokenizer,
    source_sha256: str,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[SplitWriter, SplitWriter]]:
    """Write a token file: yields the writers of the training and the validation split.

    The file is written under a temporary name beside ``path`` and renamed at the end of the block. After an error
    nothing is left. What a killed process has left is removed an hour later. Several processes may write the same path
    at once; the last whole file stays.

    Args:
        path: Of the file.
        tokenizer: Of its tokens.
        source_sha256: Of the text.
        check: Raises if ``path`` may not be replaced. It is called before anything is written, and before the rename.

    Raises:
        DataError: The folder cannot be written, or a split has no token.
    """
    check()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        disk = _Disk(descriptor)
        with _written_by_hdf5(disk) as file:
            file.attrs.update(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "tokenizer": tokenizer.to_json(),
                    "source_sha256": source_sha256,
                }
            )
            train, validation = (SplitWriter(file, name, tokenizer, disk) for name in SPLITS)
            yield train, validation
            finished = {"train": train.finish(), "validation": validation.finish()}
        parts = {name: part for name, (part, _) in finished.items()}
        tables = {name: table for name, (_, table) in finished.items()}
        disk.seek(0, os.SEEK_END)
        description = Description(tokenizer.to_json(), source_sha256, **parts)
        disk.write(appendix.to_bytes(disk.tell(), description, tables))
        disk.check()
        os.fsync(descriptor)  # first: a rename may reach the disk before the contents do
        check()  # again: writing may have taken hours
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({reason(error)}); check the folder, its permissions, space and quota"
        ) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
        with suppress(OSError, ValueError):  # gone by the rename, or never made
            temporary.unlink()


def _remove_left_over(path: Path) -> None:
    """Remove what killed writers of ``path`` have left. A live one writes to its file all the time."""
    with suppress(
        OSError
    ):  # another removes them too, or may and we may not: of no harm but their size
        for file in list(path.parent.iterdir()):
            ours = file.name.startswith(f".{path.name}.") and file.name.endswith(".tmp")
            if ours and time.time() - file.lstat().st_mtime > STALE_S:
                file.unlink()


@contextmanager
def _written_by_hdf5(disk: _Disk) -> Iterator[h5py.File]:
    """Context: a new HDF5 file. What could not be written is raised as OSError, even if HDF5 raised something else."""
    import h5py

    try:
        # The newest form of its structures: they have checksums, which other readers hold them against.
        with h5py.File(disk, "w", libver=("v110", "v110")) as file:
            yield file
    except (RuntimeError, ValueError, KeyError):
        disk.check()
        raise
    disk.check()
