"""Rows of data sets as text to train on: what ``datasets`` saved on disk, .arrow and .parquet files.

A row is a document, and is never divided. Rows keep their order: that of the paths, of the files of a saved data set,
and of each file.

A file has parts: the record batches of .arrow, the row groups of .parquet. The ranks of a team share the parts when
they are hashed. A part is read in blocks of whole rows, so any rank can read any of them afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hpczero.data import corpus
from hpczero.data.corpus import ROWS, Corpus, Text
from hpczero.errors import ConfigError, DataError
from hpczero.files.regular import WHY, Explained, check_regular, reason
from hpczero.job.long_work import Progress
from hpczero.job.team import Alone, Team, shared
from hpczero.lazy import library

OPEN_FILES = 16
KEPT_PARTS = 2  # row groups in memory: one for each thread that makes tokens
STEP_ROWS = 2**14  # of a block, at most, so that short rows are looked at in steps
IPC_FILE = b"ARROW1"  # what a file begins with that has its own table of batches


class RowBlock(NamedTuple):
    """Rows of a part that follow one another: the first, how many, bytes of their text, and its digest."""

    first: int
    num_rows: int
    nbytes: int
    digest: int


@dataclass(frozen=True)
class FileRows:
    """One part of a file.

    Attributes:
        path: of the file.
        column: that has the text.
        part: number of the part in the file.
        file_nbytes: length of the file.
        nbytes: of the text in this part.
        digest: SHA-256 of its rows; rows cut elsewhere have another.
        table: its blocks.
    """

    path: Path
    column: str
    part: int
    file_nbytes: int
    nbytes: int
    digest: bytes
    table: tuple[RowBlock, ...]

    def texts(self, index: int) -> Iterator[Text]:
        """The rows of one block, without those that are empty.

        Raises:
            DataError: The file cannot be read, or has changed since it was hashed.
        """
        block = self.table[index]
        file = _opened(self.path)
        if file.nbytes != self.file_nbytes:
            raise self._changed()
        digest = xxhash.xxh3_64()
        rows = list(file.rows(self.column, self.part, block.first, block.num_rows))
        for row in rows:
            _add(row, digest)
        if digest.intdigest() != block.digest:
            raise self._changed()
        first = file.starts[self.part] + block.first
        for number, row in enumerate(rows, first):
            if row:
                yield Text(0, row, True, f"row {number:,} of column {self.column!r}", True)

    def _changed(self) -> DataError:
        return DataError(f"{self.path}: holds other rows than a moment ago; prepare a file at rest")


def corpus_of(
    paths: Sequence[Path], column: str, split: str | None = None, team: Team | None = None
) -> Corpus:
    """The text of data sets. Collective over the team, whose ranks share the hashing.

    Args:
        paths: Folders of ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, .arrow and .parquet files. A file
            that is named twice counts once.
        column: That has the text: strings, or bytes.
        split: Of a ``DatasetDict``.
        team: None: this process alone.

    Raises:
        ConfigError: The library ``datasets`` is not installed; on every rank.
        DataError: A path is missing, damaged or no data set, has no such column or split, a row without text (null), or
            there is no text at all; on every rank.
    """
    team = team or Alone()
    listed: list[tuple[Path, int]] = []
    with team.agreed("open the data sets"):
        _library("pyarrow")
        if team.rank == 0:
            team.progress.phase("open the data sets")
            files = {Path(os.path.realpath(file)): file for file in _files(paths, split)}
            for path in files.values():
                file = _opened(path)
                file.check_column(column)
                listed += [(path, part) for part in range(len(file.starts) - 1)]
                team.progress.advance()
    listed = team.all_gather_lists(listed)[0]
    team.progress.phase("hash the rows")
    work = partial(_hashed, column=column, progress=team.progress)
    parts = shared(team, "hash the rows", listed, work)
    documents = tuple(part for part in parts if part.nbytes)
    if not documents:
        raise DataError(
            f"{', '.join(map(str, paths))}: column {column!r} holds no text; give a data set with some text"
        )
    return Corpus(documents)


def _files(paths: Sequence[Path], split: str | None) -> Iterator[Path]:
    """The files of data sets, in order."""
    of_several = False
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        folder = path
        if (path / "dataset_dict.json").is_file():
            of_several = True
            splits = sorted(one.name for one in path.iterdir() if (one / "state.json").is_file())
            if split not in splits:
                raise DataError(
                    f"{path}: got split {split!r}, expected one of {', '.join(splits)}; give --split"
                )
            folder = path / str(split)
        if not (folder / "state.json").is_file():
            raise DataError(
                f"{path}: is a folder without state.json, expected one that save_to_disk of datasets wrote; or name "
                f"the files, such as {path / 'train-*.parquet'}: those of one split"
            )
        try:
            loaded = _library("datasets").load_from_disk(os.fspath(folder), keep_in_memory=False)
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # whatever the library meets in a damaged folder
            raise DataError(
                f"{folder}: datasets cannot load it ({type(error).__name__}: {error}); save it again"
            ) from error
        yield from (Path(one["filename"]) for one in loaded.cache_files)
    if split is not None and not of_several:
        raise DataError(
            f"got split {split!r}, and no path is a folder with several splits; leave --split out"
        )


def _hashed(
    place: tuple[Path, int], column: str, progress: Progress
) -> Generator[None, None, FileRows]:
    """Hash a part of a file, in steps of a block."""
    path, part = place
    file = _opened(path)
    whole, table, first = hashlib.sha256(), [], 0
    num_rows, at_once = file.num_rows(part), 1
    while first < num_rows:
        block, taken, nbytes = xxhash.xxh3_64(), 0, 0
        most = min(STEP_ROWS, num_rows - first)
        while taken < most and nbytes < corpus.BLOCK_NBYTES:
            # All that are asked for are looked at, so no more than the block is likely to have.
            for row in file.rows(column, part, first + taken, min(at_once, most - taken)):
                _add(row, block, whole)
                taken, nbytes = taken + 1, nbytes + len(row)
                if nbytes >= corpus.BLOCK_NBYTES:
                    break
            at_once = max(taken, 1)
        if nbytes:
            table.append(RowBlock(first, taken, nbytes, block.intdigest()))
        first += taken
        progress.advance()
        yield
    progress.advance()
    nbytes = sum(each.nbytes for each in table)
    return FileRows(path, column, part, file.nbytes, nbytes, whole.digest(), tuple(table))


def _add(row: bytes, *digests: Any) -> None:
    for digest in digests:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row)


class _File:
    """An open file of rows. Any thread may read it.

    Attributes:
        path, nbytes: of the file.
        starts: number of the first row of each part, and that behind the last.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._arrow = _library("pyarrow")
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], Any] = {}
        self._groups: Any = None  # of a .parquet file
        with self._said():
            check_regular(path)
            if path.suffix == ".parquet":
                parquet = _library("pyarrow.parquet")
                self._groups = parquet.ParquetFile(path, page_checksum_verification=True)
                self._schema = self._groups.schema_arrow
                groups = range(self._groups.num_row_groups)
                lengths = [self._groups.metadata.row_group(part).num_rows for part in groups]
            else:
                with path.open("rb") as file:
                    begins = file.read(len(IPC_FILE))
                ipc = self._arrow.ipc
                read = ipc.open_file if begins == IPC_FILE else ipc.open_stream
                self._table = read(self._arrow.memory_map(os.fspath(path))).read_all()
                self._schema = self._table.schema
                columns = self._table.columns
                lengths = [len(chunk) for chunk in columns[0].chunks] if columns else []
        self.starts = [0, *itertools.accumulate(lengths)]

    def check_column(self, column: str) -> None:
        """Raises DataError if the column is not there, or is no text."""
        if self._schema.names.count(column) != 1:
            raise DataError(
                f"{self.path}: got column {column!r}, expected one of {', '.join(self._schema.names)}"
            )
        kind, types = self._schema.field(column).type, self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
        if not any(getattr(types, f"is_{name}")(kind) for name in texts):
            raise DataError(f"{self.path}: column {column!r} is {kind}, expected strings or bytes")

    def num_rows(self, part: int) -> int:
        """Rows of a part."""
        return int(self.starts[part + 1] - self.starts[part])

    def rows(self, column: str, part: int, first: int, count: int) -> Iterator[bytes]:
        """The text of some rows. Raises DataError if the file is damaged, or a row is null."""
        pa = self._arrow
        with self._said():
            found = self._part(column, part).slice(first, count)
            found.validate(full=True)  # else a damaged offset would be followed anywhere
            if pa.types.is_dictionary(found.type):
                found = found.dictionary_decode()
            found = found.cast(pa.large_binary())
        if found.null_count:
            number = found.is_null().to_pylist().index(True)
            number += self.starts[part] + first
            raise DataError(
                f"{self.path}: row {number:,} of column {column!r} is null, expected text; take such rows out: "
                "dataset.filter(...)"
            )
        _, offsets, data = found.buffers()
        bounds = np.frombuffer(offsets, np.int64)[found.offset :][: len(found) + 1].tolist()
        view = memoryview(data or b"")
        for start, stop in itertools.pairwise(bounds):
            yield bytes(view[start:stop])

    def _part(self, column: str, part: int) -> Any:  # Any: pyarrow ships no types
        if self._groups is None:
            return self._table.column(column).chunk(part)
        with self._lock:
            if (column, part) not in self._kept:
                while len(self._kept) >= KEPT_PARTS:
                    del self._kept[next(iter(self._kept))]
                group = self._groups.read_row_group(part, columns=[column], use_threads=False)
                # Wide offsets first: strings of more than 2 GB do not fit into one array otherwise.
                whole = group.column(0).cast(self._arrow.large_binary()).combine_chunks()
                self._kept[column, part] = whole
            return self._kept[column, part]

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Context: what the library meets becomes a DataError."""
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: no such file; give existing data sets") from error
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{self.path}: cannot be read as rows ({reason(error)}); expected {' or '.join(ROWS)}, whole"
            ) from error


def _opened(path: Path) -> _File:
    """The file as it is now, opened once. Raises DataError if it cannot be read."""
    if path.suffix not in ROWS:
        raise DataError(f"{path}: got a file of another kind, expected {' or '.join(ROWS)}")
    with Explained(DataError, f"{path}: cannot be read ({WHY})"):
        now = path.stat()
    return _opened_as(path, now.st_size, now.st_mtime_ns, now.st_ino)


@lru_cache(OPEN_FILES)
def _opened_as(path: Path, nbytes: int, *_: int) -> _File:
    return _File(path, nbytes)


def _library(name: str) -> Any:
    """``datasets``, or pyarrow, which it brings. Raises ConfigError if it is not installed."""
    return library(name, "a data set", "'datasets>=5'")
