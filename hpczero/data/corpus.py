"""Which text to train on: its documents, their order and the hash of them all.

A document is a file. It is read in blocks, so a corpus may be far larger than memory. Where its blocks end is found
when it is hashed, so that any rank can read any of them afterwards.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import xxhash

from hpczero.errors import DataError
from hpczero.files.regular import open_regular, reason
from hpczero.job.long_work import Progress
from hpczero.job.team import Alone, Team, shared

if TYPE_CHECKING:
    from hpczero.data.rows import FileRows

BLOCK_NBYTES = 4 * 2**20
REST_NBYTES = 4 * 2**20  # of the line that a block ends in; more of it is for the next block
ROWS = (".arrow", ".parquet")  # how files of rows end; as text their bytes mean nothing
# What files begin with that hold text in packed form, if any.
BINARY = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"\x89HDF\r\n": "HDF5",
}
# Third-party packages are not the standard library, and its tests are more bytes than all the rest.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class TextBlock(NamedTuple):
    """A piece of a document: where it begins, its bytes, and their digest (xxh3, 64 bits)."""

    offset: int
    nbytes: int
    digest: int


class Text(NamedTuple):
    """Text that is read at once.

    Attributes:
        offset: where it begins, in bytes of what ``where`` names.
        text: the bytes.
        ends_document: whether a document ends with it.
        where: names its place in its file, for messages; empty for the file itself.
        is_whole: whether it is all in one split.
    """

    offset: int
    text: bytes
    ends_document: bool
    where: str = ""
    is_whole: bool = False


@dataclass(frozen=True)
class Document:
    """One file of text.

    Attributes:
        path: of the file.
        nbytes: its length.
        digest: SHA-256 of its bytes.
        table: its blocks of about 4 MiB. Each but the last ends after a line, or in a line of 4 MiB or more.
    """

    path: Path
    nbytes: int
    digest: bytes
    table: tuple[TextBlock, ...]

    def block(self, index: int) -> bytes:
        """The bytes of one block.

        Raises:
            DataError: The file cannot be read, or has changed since it was hashed.
        """
        offset, nbytes, digest = self.table[index]
        with _reading(self.path) as file:
            file.seek(offset)
            block = file.read(nbytes)
            now = os.fstat(file.fileno()).st_size
        if now != self.nbytes or len(block) != nbytes:
            raise DataError(
                f"{self.path}: has {now} bytes, had {self.nbytes} a moment ago; prepare a file at rest"
            )
        if xxhash.xxh3_64_intdigest(block) != digest:
            raise DataError(
                f"{self.path}: holds another text than a moment ago; prepare a file at rest"
            )
        return block

    def texts(self, index: int) -> Iterator[Text]:
        """The text of one block; raises as ``block``."""
        is_last = index == len(self.table) - 1
        yield Text(self.table[index].offset, self.block(index), is_last)


TextSource: TypeAlias = "Document | FileRows"


@dataclass(frozen=True)
class Corpus:
    """Documents in an order that depends on no path, date or machine.

    Files are shuffled by the hash of their contents; rows of data sets stay as they are.
    """

    documents: tuple[TextSource, ...]

    @classmethod
    def of_paths(
        cls, paths: Sequence[Path], progress: Progress | None = None, team: Team | None = None
    ) -> Corpus:
        """Files, and all files below folders, except empty ones and names that begin with a dot. Links are followed.

        Args:
            paths: Of files and folders.
            progress: Told how far the work is; None: that of the team.
            team: Ranks that share the hashing; collective over it. Rank 0 lists the files. None: this process alone.

        Raises:
            DataError: A path is missing, unreadable, holds no text, is a file of rows, or is packed; on every rank.
        """
        team = team or Alone(progress)
        listed = _listed(paths, team)
        measured = _measured([file for _, files in listed for file, _ in files], team)
        found: dict[Path, Document] = {}
        for path, files in listed:
            documents = {real: measured[file] for file, real in files if measured[file].nbytes}
            if not documents:
                raise _no_text(path, len(files))
            found.update(documents)
        return cls._ordered(list(found.values()), "no text files were given")

    @staticmethod
    def check_paths(paths: Sequence[Path]) -> None:
        """Refuse what ``of_paths`` refuses, as far as one look at each path tells, with a DataError."""
        for path in paths:
            if os.path.isdir(path):
                try:
                    os.scandir(path).close()
                except OSError as error:
                    raise _no_listing(error) from error
                continue
            _refuse_rows(path)
            with _reading(path) as file:
                begins = file.read(1)
            if not begins:
                raise _no_text(path, 1)

    @classmethod
    def standard_library(cls, progress: Progress | None = None, team: Team | None = None) -> Corpus:
        """The sources of this Python's standard library, without its tests: 8 to 12 MB; arguments as of ``of_paths``.

        Raises:
            DataError: This Python has no source files (some containers ship byte code alone); on every rank.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        team = team or Alone(progress)
        ((_, files),) = _listed([folder], team, skip=_NOT_LIBRARY)
        measured = _measured([file for file, _ in files if file.suffix == ".py"], team)
        return cls._ordered(
            [document for document in measured.values() if document.nbytes],
            f"{folder}: this Python has no standard library sources; give text files instead",
        )

    @classmethod
    def _ordered(cls, documents: list[Document], if_empty: str) -> Corpus:
        if not documents:
            raise DataError(if_empty)
        return cls(
            tuple(sorted(documents, key=lambda document: (document.digest, document.nbytes)))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all documents."""
        return sum(document.nbytes for document in self.documents)

    @property
    def digest(self) -> str:
        """SHA-256 over the documents' hashes in order, as hexadecimal digits; equal text gives an equal digest."""
        return hashlib.sha256(b"".join(document.digest for document in self.documents)).hexdigest()


def _listed(
    paths: Sequence[Path], team: Team, skip: frozenset[str] = frozenset()
) -> list[tuple[Path, list[tuple[Path, Path]]]]:
    """Each path with its files, and what these are once links are followed. Rank 0 looks."""
    found = []
    with team.agreed("list the files"):
        if team.rank == 0:
            team.progress.phase("list the files")
            for path in paths:
                below = _files_below(path, team.progress, skip) if os.path.isdir(path) else [path]
                resolved = []
                for file in below:
                    _refuse_rows(file)
                    resolved.append((file, Path(os.path.realpath(file))))
                    team.progress.advance()  # there may be a hundred thousand, on a slow file system
                found.append((path, resolved))
    return team.all_gather_lists(found)[0]


def _measured(files: Sequence[Path], team: Team) -> dict[Path, Document]:
    """The documents of ``files``, of which each rank hashes a share."""
    total, longest_first = 0, []
    if team.rank == 0:
        sizes = _sizes(files, team.progress)
        total = sum(sizes)
        longest_first = sorted(range(len(files)), key=lambda index: -sizes[index])
    longest_first = team.all_gather_lists(longest_first)[0]
    total = int(team.all_gather(np.array([total], dtype=np.int64))[0, 0])
    # As cards are dealt: no rank gets more than the longest file above its share.
    order = [files[index] for index in longest_first]
    team.progress.phase("hash the text", total)
    found = shared(team, "hash the text", order, partial(_hashed, progress=team.progress))
    return dict(zip(order, found, strict=True))


def _files_below(folder: Path, progress: Progress, skip: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise _no_listing(error) from error

    found: list[Path] = []
    seen: set[str] = set()  # links may lead in circles
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=not skip):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            elif not skip and path.is_symlink() and not path.exists():
                raise DataError(
                    f"{path}: is a link to a file that is not there; take the link away"
                )
            progress.advance()
        progress.advance()
    return sorted(found)


def _refuse_rows(path: Path) -> None:
    if path.suffix in ROWS:
        raise DataError(
            f"{path}: is a file of rows, not text; tokenize the column that has the text: "
            "python -m hpczero.data prepare PATHS --column NAME"
        )


def _no_listing(error: OSError) -> DataError:
    return DataError(f"{error.filename}: cannot list the folder ({error.strerror})")


def _no_text(path: Path, num_files: int) -> DataError:
    return DataError(
        f"{path}: holds no text (0 bytes in {num_files} files); give files with some text"
    )


def _hashed(path: Path, progress: Progress) -> Generator[None, None, Document]:
    """Measure and hash a file, in steps of a block."""
    digest, nbytes, table = hashlib.sha256(), 0, []
    for block in _blocks(path):
        kind = next((BINARY[begin] for begin in BINARY if block.startswith(begin)), None)
        if kind is not None and not nbytes:
            raise DataError(f"{path}: is a file of {kind}, not text; give text alone, unpacked")
        digest.update(block)
        table.append(TextBlock(nbytes, len(block), xxhash.xxh3_64_intdigest(block)))
        nbytes += len(block)
        progress.advance(len(block))
        yield
    progress.advance()  # an empty file has no block
    return Document(path, nbytes, digest.digest(), tuple(table))


def _sizes(paths: Sequence[Path], progress: Progress) -> list[int]:
    """Bytes of files as they are now. A missing file counts 0; reading it raises."""
    sizes = []
    for path in paths:
        progress.advance()
        sizes.append(0)
        with suppress(OSError, ValueError):
            sizes[-1] = path.stat().st_size
    return sizes


def _blocks(path: Path) -> Iterator[bytes]:
    with _reading(path) as file:
        left = b""
        while read := file.read(BLOCK_NBYTES):
            rest = file.readline(REST_NBYTES)
            block = left + read + rest
            ended = len(rest) < REST_NBYTES or rest.endswith(b"\n")
            end = len(block) if ended else _end_within_line(block)
            yield block[:end]
            left = block[end:]
        if left:
            yield left


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """An open file; an error of the system becomes a DataError."""
    try:
        with open(open_regular(path), "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file or folder; give existing text files or folders"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); check the path and its permissions"
        ) from error


def _end_within_line(block: bytes) -> int:
    """Where a part of a line that is too long for memory may end: after a word, or else after a UTF-8 character."""
    end = block.rfind(b" ", len(block) // 2)
    if end > 0:
        return end
    for back in range(1, 5):
        if block[-back] & 0xC0 != 0x80:  # it begins a character, which may not be whole
            return len(block) - back
    return len(block)  # no UTF-8: whoever needs that says so
