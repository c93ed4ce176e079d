"""The token file: token ids of two splits, with all that is needed to read them back as text.

A file is HDF5 for any reader, and has an appendix for this one (``appendix.py``):

    /                  format, version, tokenizer (JSON), source_sha256
    /train/tokens      unsigned integers of the smallest size that fits; attributes documents, text_nbytes
    /validation/tokens the same

Every rank opens the file and reads bytes at offsets, never collectively. Nothing outside of the file is read, and HDF5
is not used. The bytes of a token file never change once it has its name. Preparing it again puts a new file there, and
a reader that has the old one open goes on reading that. No lock is therefore needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.data import appendix
from hpczero.data.appendix import Slabs, TokenArray
from hpczero.data.batches import Batches, HeldOut
from hpczero.data.tokenize import Tokenizer, from_json
from hpczero.errors import DataError
from hpczero.files.regular import Closing, open_regular, reason

if TYPE_CHECKING:
    from hpczero.data.sources import FlatTokens

VERSION = appendix.VERSION

SIGNATURE = b"\x89HDF\r\n\x1a\n"

_REMEDY = "prepare it with `python -m hpczero.data prepare`"


class TokenSplit:
    """One row of tokens in an open file; ``split[a:b]`` reads them.

    Attributes:
        dtype: of a token: uint8, uint16 or uint32.
        documents: number of documents that end in it.
        text_nbytes: bytes of the text.
    """

    def __init__(self, source: Slabs | FlatTokens, documents: int, text_nbytes: int) -> None:
        self._source = source
        self.dtype: np.dtype[np.unsignedinteger[Any]] = source.dtype
        self.documents = documents
        self.text_nbytes = text_nbytes

    def __len__(self) -> int:
        return self._source.numel

    def __getitem__(self, index: slice) -> TokenArray:
        """Tokens of a slice. Raises DataError if they are damaged, not of the vocabulary, or cannot be read."""
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"TokenSplit: got a slice with step {step}, expected neighbours")
        return self._source.read(start, stop)

    def check(self) -> None:
        """Read and check all tokens. Raises DataError, as a slice does, at the first that are not sound."""
        self._source.check_all()

    @property
    def fingerprint(self) -> str:
        """Equal for splits of equal tokens, as far as their files tell without reading them."""
        said = f"{len(self)} {self.dtype.itemsize} {self.documents} {self.text_nbytes}"
        return f"{said} {hashlib.sha256(self._source.fingerprint).hexdigest()}"

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, so that nats per byte = nats per token / bytes per token.

        Separators count as tokens.
        """
        return self.text_nbytes / len(self)


class TokenFile(Closing):
    """A token file open for reading. Not collective: each rank opens its own.

    Attributes:
        path: as given.
        tokenizer: text to tokens and back.
        vocab_size: number of token ids, the separator included.
        source_sha256: SHA-256 of the text it was made of.
        train, validation: the splits.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        source_sha256: str,
        splits: tuple[TokenSplit, TokenSplit],
        close: Callable[[], None],
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.source_sha256 = source_sha256
        self.train, self.validation = splits
        self._close = close

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Open and check a file. Its tokens are checked as they are read.

        Raises:
            DataError: It is missing, unreadable, not a token file, of another version, or damaged.
        """
        try:
            descriptor = open_regular(path)
        except FileNotFoundError as error:
            raise DataError(f"{path}: no such token file; {_REMEDY}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {reason(error)}; {_REMEDY}") from error
        try:
            return cls._of(path, descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise DataError(
                f"{path}: not a usable token file: {reason(error)}; {_REMEDY}"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _of(cls, path: Path, descriptor: int) -> TokenFile:
        found = appendix.read(descriptor)
        if found is None:
            is_hdf5 = os.pread(descriptor, len(SIGNATURE), 0) == SIGNATURE
            raise ValueError(
                "its end is not there: of version 1, cut short, or changed by another program"
                if is_hdf5
                else "it is not HDF5"
            )
        description, tables = found
        tokenizer = from_json(description.tokenizer)
        train, validation = (
            TokenSplit(
                Slabs(path, descriptor, name, part, tables[name], tokenizer.vocab_size),
                part.documents,
                part.text_nbytes,
            )
            for name, part in description.parts().items()
        )
        splits = (train, validation)
        return cls(path, tokenizer, description.source_sha256, splits, lambda: os.close(descriptor))

    @property
    def fingerprint(self) -> str:
        """Equal for files that mean the same, wherever they lie."""
        tokenizer = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        splits = f"{self.train.fingerprint} {self.validation.fingerprint}"
        return f"{VERSION} {self.source_sha256} {tokenizer} {splits}"

    def describe_shares(self) -> str:
        """What the run header says of further files: nothing."""
        return ""

    def batches(self, seq_len: int, global_batch: int, seed: int) -> Batches:
        """Training batches; raises as ``Batches``."""
        return Batches(self.train, seq_len, global_batch, seed)

    def held_out(self, seq_len: int, max_samples: int) -> HeldOut:
        """Held-out samples; raises as ``HeldOut``."""
        return HeldOut(self.validation, seq_len, max_samples)

    def close(self) -> None:
        """Close the file; the splits cannot be read any more."""
        self._close()
