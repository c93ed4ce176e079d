"""The token file: HDF5, one dataset of token ids per split, with all that is needed to read them back as text.

Owns: the format, writing it whole or not at all, and refusing a file that is not one. Must not know: where text comes
from, batches, MPI. Layout:

    /                  format, version, tokenizer (JSON), source_sha256
    /train/tokens      unsigned integers of the smallest size that fits; attributes documents, text_nbytes
    /validation/tokens the same

Every rank opens the file read-only by the serial driver: samples are read by rank, never collectively. HDF5's own file
lock is switched off, as many parallel file systems refuse it; a token file never changes once it has its name, so no
lock is needed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpczero.data.tokenize import Tokenizer, from_json
from hpczero.errors import DataError

if TYPE_CHECKING:
    import h5py

FORMAT = "hpczero tokens"
VERSION = 1
CHUNK_TOKENS = 2**15  # a random sample then reads 64 KiB, and the table of chunks stays small
WRITE_TOKENS = 2**20

TokenArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class Split:
    """One row of tokens in an open file; ``split[a:b]`` reads them."""

    def __init__(self, group: h5py.Group) -> None:
        self._tokens = group["tokens"]
        self.documents = int(group.attrs["documents"])
        self.text_nbytes = int(group.attrs["text_nbytes"])

    def __len__(self) -> int:
        return int(self._tokens.shape[0])

    def __getitem__(self, index: slice) -> TokenArray:
        tokens: TokenArray = self._tokens[index]
        return tokens

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """uint8, uint16 or uint32."""
        dtype: np.dtype[np.unsignedinteger[Any]] = self._tokens.dtype
        return dtype

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: nats per byte = nats per token / bytes per token. Separators count as tokens."""
        return self.text_nbytes / len(self)


class TokenFile:
    """A token file open for reading. Not collective: each rank opens its own."""

    def __init__(self, path: Path, file: h5py.File) -> None:
        self.path = path
        self._file = file
        self.tokenizer: Tokenizer = from_json(str(file.attrs["tokenizer"]))
        self.source_sha256 = str(file.attrs["source_sha256"])
        self.train = Split(file["train"])
        self.validation = Split(file["validation"])

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Open and check a file.

        Raises:
            DataError: It is missing, unreadable, not a token file, of another version, or damaged.
        """
        import h5py

        remedy = "prepare it with `python -m hpczero.data prepare`"
        if not path.is_file():
            raise DataError(f"{path}: no such token file; {remedy}")
        try:
            file = h5py.File(path, "r", locking=False)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened as HDF5 ({error}); {remedy}") from error
        try:
            _check(file)
            return cls(path, file)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            file.close()
            raise DataError(f"{path}: not a usable token file: {error}; {remedy}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the separator included."""
        return self.tokenizer.vocab_size

    def close(self) -> None:
        """Close the file; the splits cannot be read any more."""
        self._file.close()

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SplitWriter:
    """Appends documents to one split of a file that is being written, in large writes."""

    def __init__(self, file: h5py.File, name: str, tokenizer: Tokenizer) -> None:
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._group = file.create_group(name)
        self._tokens = self._group.create_dataset(
            "tokens", shape=(0,), maxshape=(None,), chunks=(CHUNK_TOKENS,), dtype=self._dtype
        )
        self._tokenizer = tokenizer
        self._pending: list[npt.NDArray[np.generic]] = []
        self._pending_numel = 0
        self._documents = 0
        self._text_nbytes = 0

    def append_text(self, text: bytes) -> None:
        """Add a piece of a document."""
        self._append(self._tokenizer.encode(text))
        self._text_nbytes += len(text)

    def end_document(self) -> None:
        """Add the separator."""
        self._append(np.array([self._tokenizer.separator]))
        self._documents += 1

    def finish(self) -> None:
        """Write what is pending, and the counts."""
        self._flush()
        self._group.attrs.update({"documents": self._documents, "text_nbytes": self._text_nbytes})

    def _append(self, ids: npt.NDArray[np.int64]) -> None:
        self._pending.append(ids.astype(self._dtype))
        self._pending_numel += len(ids)
        if self._pending_numel >= WRITE_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if self._pending_numel:
            start = self._tokens.shape[0]
            self._tokens.resize(start + self._pending_numel, axis=0)
            self._tokens[start:] = np.concatenate(self._pending)
            self._pending, self._pending_numel = [], 0


@contextmanager
def create(
    path: Path, tokenizer: Tokenizer, source_sha256: str
) -> Iterator[tuple[SplitWriter, SplitWriter]]:
    """Write a token file: yields the writers of the training and the validation split.

    The file is written under a temporary name beside ``path`` and renamed at the end of the block; after an error
    nothing is left. Several processes may write the same path at once: the last whole file stays.

    Raises:
        DataError: The folder cannot be written, or a split has no token.
    """
    import h5py

    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(temporary, "w", locking=False) as file:
            file.attrs.update(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "tokenizer": tokenizer.to_json(),
                    "source_sha256": source_sha256,
                }
            )
            writers = (
                SplitWriter(file, "train", tokenizer),
                SplitWriter(file, "validation", tokenizer),
            )
            yield writers
            for writer in writers:
                writer.finish()
            _check(file)
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error}); check the folder, its permissions and quota"
        ) from error
    finally:
        with suppress(OSError):  # gone by the rename, or never made
            temporary.unlink()


def _sync(path: Path) -> None:
    # A rename may reach the disk before the contents do.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(file: h5py.File) -> None:
    """What reader and writer both hold a token file to; raises DataError, KeyError or TypeError."""
    found = file.attrs.get("format")
    if found != FORMAT:
        raise DataError(f"its format is {found!r}, expected {FORMAT!r}")
    version = int(file.attrs["version"])
    if version != VERSION:
        raise DataError(f"it has version {version}, this hpczero reads version {VERSION}")
    for split in ("train", "validation"):
        tokens = file[split]["tokens"]
        if (
            tokens.ndim != 1
            or tokens.dtype not in (np.uint8, np.uint16, np.uint32)
            or not len(tokens)
        ):
            raise DataError(
                f"/{split}/tokens has dtype {tokens.dtype} and shape {tokens.shape}, "
                "expected a row of at least one unsigned token id; was there enough text for both splits?"
            )
