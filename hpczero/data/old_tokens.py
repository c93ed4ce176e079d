"""Token files of version 1, which have no digests: HDF5 and nothing else.

Owns: opening one so that nothing outside of it is read, and the check that its ids are of the vocabulary. Must not
know: how newer ones are written. Most damage to such a file cannot be seen; ``TokenFile.open`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.data.appendix import FORMAT, SPLITS
from hpczero.data.slabs import TokenArray, check_ids
from hpczero.errors import DataError

if TYPE_CHECKING:
    import h5py

VERSION = 1
READ_NUMEL = 2**20


class OldSplit:
    """One split in an open file, read as ``Slabs`` are."""

    fingerprint = b""  # nothing tells of its tokens but their number

    def __init__(self, path: Path, tokens: h5py.Dataset, vocab_size: int) -> None:
        self._what = f"{path}: {tokens.name}"
        self._tokens = tokens
        self._vocab_size = vocab_size
        self.dtype: np.dtype[np.unsignedinteger[Any]] = tokens.dtype
        self.numel = int(tokens.shape[0])

    def read(self, start: int, stop: int) -> TokenArray:
        """(stop - start,) tokens.

        Raises:
            DataError: they are not of the vocabulary, or cannot be read.
        """
        try:
            found: TokenArray = self._tokens[start : max(stop, start)]
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{self._what} cannot be read: {error}") from error
        check_ids(found, self._vocab_size, f"{self._what}[{start}:{stop}]")
        return found

    def check_all(self) -> None:
        """Read all of it.

        Raises:
            DataError: as ``read``.
        """
        for start in range(0, self.numel, READ_NUMEL):
            self.read(start, min(start + READ_NUMEL, self.numel))


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Context: an HDF5 file, closed again if the block fails. What HDF5 raises in the block is an error of the file.

    Raises:
        ValueError: it is no token file of version 1, is damaged, or would have other files read.
    """
    import h5py

    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise ValueError(f"cannot be opened as HDF5 ({error})") from error
    try:
        try:
            _check(file)
            yield file
        except (KeyError, TypeError, AttributeError, OSError, RuntimeError, IndexError) as error:
            raise ValueError(str(error)) from error
    except BaseException:
        file.close()
        raise


def _check(file: h5py.File) -> None:
    found = file.attrs.get("format")
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
    version = int(file.attrs["version"])
    if version != VERSION:
        raise ValueError(
            f"it has version {version} and not the end of such a file: cut short, or changed by another program"
            if version == VERSION + 1
            else f"it has version {version}, this hpczero reads up to version {VERSION + 1}; upgrade hpczero"
        )
    for split in SPLITS:
        tokens = _inside(_inside(file, split), "tokens")
        if tokens.external:
            raise ValueError(
                f"{tokens.name} keeps its tokens in {tokens.external[0][0]!r}, expected in itself"
            )
        if tokens.is_virtual:
            raise ValueError(f"{tokens.name} is put together of other datasets, expected its own")
        if (
            tokens.ndim != 1
            or tokens.dtype not in (np.uint8, np.uint16, np.uint32)
            or not tokens.size
        ):
            raise ValueError(
                f"{tokens.name} has dtype {tokens.dtype} and shape {tokens.shape}, "
                "expected a row of at least one unsigned token id"
            )


def _inside(group: h5py.Group, name: str) -> Any:  # Any: h5py ships no types
    """A member of ``group`` that lies in this file and has no other name."""
    import h5py

    link = group.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise ValueError(
            f"{name} is a link to the file {link.filename!r}, expected to be in itself"
        )
    if isinstance(link, h5py.SoftLink):
        raise ValueError(f"{name} is a link to {link.path!r}, expected tokens")
    return group[name]
