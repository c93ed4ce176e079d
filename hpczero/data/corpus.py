"""Which text to train on.

Owns: finding documents, their order and the hash of them all. Must not know: tokens, splits. A document is a file. It
is read in blocks, so a corpus may be far larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpczero.errors import DataError
from hpczero.files.regular import open_regular, reason
from hpczero.job.long_work import Progress

BLOCK_NBYTES = 4 * 2**20
REST_NBYTES = 4 * 2**20  # of the line that a block ends in; more of it is for the next block
# Third-party packages are not the standard library, and its tests are more bytes than all the rest.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One file of text; ``digest`` is the SHA-256 of its bytes."""

    path: Path
    nbytes: int
    digest: bytes

    @classmethod
    def of(cls, path: Path, progress: Progress | None = None) -> Document:
        """Measure and hash a file; ``progress`` is told how far it is.

        Raises:
            DataError: It cannot be read.
        """
        digest, nbytes = hashlib.sha256(), 0
        for block in _blocks(path):
            digest.update(block)
            nbytes += len(block)
            if progress is not None:
                progress.advance(len(block))
        if progress is not None:
            progress.advance()  # an empty file has no block
        return cls(path, nbytes, digest.digest())

    def blocks(self) -> Iterator[bytes]:
        """The bytes in pieces of about 4 MiB. Each but the last ends after a line, or in a line of 4 MiB or more.

        Raises:
            DataError: The file cannot be read, or has changed since it was hashed. The change is found after the last
                piece.
        """
        digest, nbytes = hashlib.sha256(), 0
        for block in _blocks(self.path):
            digest.update(block)
            nbytes += len(block)
            yield block
        if nbytes != self.nbytes:
            raise DataError(
                f"{self.path}: has {nbytes} bytes, had {self.nbytes} a moment ago; prepare a file at rest"
            )
        if digest.digest() != self.digest:
            raise DataError(
                f"{self.path}: holds another text than a moment ago; prepare a file at rest"
            )


@dataclass(frozen=True)
class Corpus:
    """Documents ordered by the hash of their contents: a fixed shuffle that depends on no path, date or machine."""

    documents: tuple[Document, ...]

    @classmethod
    def of_paths(cls, paths: Sequence[Path], progress: Progress | None = None) -> Corpus:
        """Files, and all files below folders, except empty ones and names that begin with a dot.

        Args:
            paths: Of files and folders.
            progress: Told how far it is.

        Raises:
            DataError: A path is missing, unreadable, or holds no text.
        """
        progress = progress or Progress()
        progress.phase("list the files")
        files_of = {
            path: _files_below(path, progress) if os.path.isdir(path) else [path] for path in paths
        }
        total_nbytes = _nbytes([file for files in files_of.values() for file in files], progress)
        progress.phase("hash the text", total_nbytes)
        found: dict[Path, Document] = {}
        for path, files in files_of.items():
            measured = (Document.of(file, progress) for file in files)
            documents = [document for document in measured if document.nbytes]
            if not documents:
                raise _no_text(path, len(files))
            for document in documents:
                found[document.path.resolve()] = document
                progress.advance()  # there may be a hundred thousand, on a slow file system
        return cls._ordered(list(found.values()), "no text files were given")

    @staticmethod
    def check_paths(paths: Sequence[Path]) -> None:
        """Refuse what ``of_paths`` refuses, as far as one look at each path tells. It takes the same time for any size.

        Raises:
            DataError: As ``of_paths``.
        """
        for path in paths:
            if os.path.isdir(path):
                try:
                    os.scandir(path).close()
                except OSError as error:
                    raise _no_listing(error) from error
                continue
            with _reading(path) as file:
                begins = file.read(1)
            if not begins:
                raise _no_text(path, 1)

    @classmethod
    def standard_library(cls, progress: Progress | None = None) -> Corpus:
        """The sources of this Python's standard library, without its tests: 8 to 12 MB.

        Args:
            progress: Told how far it is.

        Raises:
            DataError: This Python has no source files (some containers ship byte code alone).
        """
        progress = progress or Progress()
        folder = Path(sysconfig.get_path("stdlib"))
        progress.phase("list the files")
        below = _files_below(folder, progress, skip=_NOT_LIBRARY)
        files = [path for path in below if path.suffix == ".py"]
        progress.phase("hash the text", _nbytes(files, progress))
        measured = (Document.of(file, progress) for file in files)
        return cls._ordered(
            [document for document in measured if document.nbytes],
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


def _files_below(
    folder: Path, progress: Progress, skip: frozenset[str] = frozenset()
) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise _no_listing(error) from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            progress.advance()
        progress.advance()
    return sorted(found)


def _no_listing(error: OSError) -> DataError:
    return DataError(f"{error.filename}: cannot list the folder ({error.strerror})")


def _no_text(path: Path, num_files: int) -> DataError:
    return DataError(
        f"{path}: holds no text (0 bytes in {num_files} files); give files with some text"
    )


def _nbytes(paths: Sequence[Path], progress: Progress) -> int:
    """Bytes of files as they are now. A missing file counts 0; reading it raises."""
    total = 0
    for path in paths:
        progress.advance()
        with suppress(OSError, ValueError):
            total += path.stat().st_size
    return total


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
