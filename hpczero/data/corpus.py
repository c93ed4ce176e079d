"""Which text to train on.

Owns: finding documents, their order and the hash of them all. Must not know: tokens, splits. A document is a file,
read in blocks, so that a corpus may be far larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.errors import DataError
from hpczero.regularfile import open_regular, reason

BLOCK_NBYTES = 4 * 2**20
# Third-party packages are not the standard library, and its tests are more bytes than all the rest.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One file of text; ``digest`` is the SHA-256 of its bytes."""

    path: Path
    nbytes: int
    digest: bytes

    @classmethod
    def of(cls, path: Path, tick: Callable[[], None] = lambda: None) -> Document:
        """Measure and hash a file; ``tick`` is called as it gets on.

        Raises:
            DataError: It cannot be read.
        """
        digest, nbytes = hashlib.sha256(), 0
        for block in _blocks(path):
            digest.update(block)
            nbytes += len(block)
            tick()
        return cls(path, nbytes, digest.digest())

    def blocks(self) -> Iterator[bytes]:
        """The bytes in pieces of about 4 MiB; each but the last ends after a line.

        Raises:
            DataError: The file cannot be read, or has changed since it was hashed; told after the last piece.
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
    def of_paths(cls, paths: Sequence[Path], tick: Callable[[], None] = lambda: None) -> Corpus:
        """Files, and all files below folders, but for empty ones and names that begin with a dot.

        Args:
            paths: Of files and folders.
            tick: Called as it gets on.

        Raises:
            DataError: A path is missing, unreadable, or holds no text.
        """
        found: dict[Path, Document] = {}
        for path in paths:
            files = _files_below(path, tick=tick) if os.path.isdir(path) else [path]
            measured = (Document.of(file, tick) for file in files)
            documents = [document for document in measured if document.nbytes]
            if not documents:
                raise DataError(
                    f"{path}: holds no text (0 bytes in {len(files)} files); give files with some text"
                )
            found.update((document.path.resolve(), document) for document in documents)
        return cls._ordered(list(found.values()), "no text files were given")

    @classmethod
    def standard_library(cls, tick: Callable[[], None] = lambda: None) -> Corpus:
        """The sources of this Python's standard library, without its tests: 8 to 12 MB that are always there.

        Args:
            tick: Called as it gets on.

        Raises:
            DataError: This Python has no source files (some containers ship byte code alone).
        """
        folder = Path(sysconfig.get_path("stdlib"))
        files = [path for path in _files_below(folder, skip=_NOT_LIBRARY) if path.suffix == ".py"]
        measured = (Document.of(file, tick) for file in files)
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
    folder: Path, skip: frozenset[str] = frozenset(), tick: Callable[[], None] = lambda: None
) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot list the folder ({error.strerror})") from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
        tick()
    return sorted(found)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(open_regular(path), "rb") as file:
            while block := file.read(BLOCK_NBYTES):
                yield block + file.readline()
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file or folder; give existing text files or folders"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); check the path and its permissions"
        ) from error
