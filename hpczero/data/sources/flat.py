"""Flat token files, memory-mapped: .bin as nanoGPT has them, .bin with .idx as Megatron has them, .npy.

Owns: their forms, and that every id is one of the vocabulary. Must not know: mixtures, tokenizers. Such files carry no
digests, so damage that gives other ids of the vocabulary cannot be seen.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py (the form of .idx); NumPy, format of .npy.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpczero.data.slabs import TokenArray, check_ids
from hpczero.errors import DataError
from hpczero.files.regular import is_there, open_regular, reason

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEAD = 34  # bytes: magic, version, dtype, numbers of sequences and of documents
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
CHECK_NUMEL = 2**22  # read at a time
SAMPLED_NBYTES = 2**20  # of each end of a file, for its fingerprint
SAMPLES = 64


class Flat:
    """Tokens ``start`` to ``stop`` of a memory-mapped file; a ``Source`` of a split."""

    def __init__(
        self,
        path: Path,
        ids: np.memmap[Any, np.dtype[Any]],
        start: int,
        stop: int,
        vocab_size: int,
        fingerprint: bytes,
    ) -> None:
        self._path = path
        self._ids = ids
        self._start = start
        self._vocab_size = vocab_size
        self._nbytes = _nbytes_now(ids)
        self.fingerprint = fingerprint
        self.numel = stop - start
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(f"<u{ids.dtype.itemsize}")

    def read(self, start: int, stop: int) -> TokenArray:
        """(stop - start,) tokens.

        Raises:
            DataError: they are not of the vocabulary, or the file was cut since it was opened.
        """
        if _nbytes_now(self._ids) < self._nbytes:  # to touch what is gone ends the process
            raise DataError(f"{self._path}: is shorter than when it was opened; leave it alone")
        found = np.array(self._ids[self._start + start : self._start + stop]).view(self.dtype)
        if found.size:  # an id below 0 is a very large one
            check_ids(found, self._vocab_size, f"{self._path}[{start}:{stop}]")
        return found

    def check_all(self) -> None:
        """Read all. Raises DataError at the first id that is not of the vocabulary."""
        for start in range(0, self.numel, CHECK_NUMEL):
            self.read(start, min(start + CHECK_NUMEL, self.numel))


def mapped(path: Path, dtype: str | None) -> np.memmap[Any, np.dtype[Any]]:
    """The tokens of a flat file.

    Args:
        path: ends in .npy, or in anything else for bare tokens. The form is Megatron's where a file of the same name
            with .idx lies beside it.
        dtype: of bare tokens, little endian; None: uint16. Other forms state their own.

    Raises:
        DataError: the file cannot be read, is empty, or is not of that form.
    """
    try:
        descriptor = open_regular(path)
        os.close(descriptor)
        if path.suffix == ".npy":
            found = np.lib.format.open_memmap(path, mode="r")
        else:
            index = path.with_suffix(".idx")
            stated = _megatron(index, path) if is_there(index) else None
            name = stated or dtype or "uint16"
            if path.stat().st_size % np.dtype(name).itemsize:
                raise ValueError(f"its {path.stat().st_size:,} bytes are no whole number of {name}")
            found = np.memmap(path, dtype=np.dtype(name).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a flat token file: {reason(error)}") from error
    except Exception as error:  # NumPy reads a header of .npy as Python, which fails in many ways
        raise DataError(f"{path}: not a flat token file: its header cannot be read") from error
    kind = found.dtype.newbyteorder("=").name
    if found.ndim != 1 or kind not in DTYPES or found.dtype.byteorder == ">" or not len(found):
        raise DataError(
            f"{path}: holds {found.dtype} of shape {found.shape}, expected one row of {', '.join(DTYPES)}, "
            "little endian"
        )
    if dtype is not None and kind != dtype:
        raise DataError(
            f"{path}: holds {kind}, and dtype is {dtype!r}; leave it out, or state {kind!r}"
        )
    mine: np.memmap[Any, np.dtype[Any]] = found
    return mine


def _nbytes_now(ids: np.memmap[Any, np.dtype[Any]]) -> int:
    """Length of the mapped file, wherever it is called now."""
    mapping: mmap.mmap = ids.base  # type: ignore[assignment]
    return mapping.size()


def fingerprint(path: Path) -> bytes:
    """Equal for equal files; of a large one both ends and some blocks between are looked at, in the same places."""
    seen = xxhash.xxh3_128()
    nbytes = path.stat().st_size
    seen.update(f"{nbytes} ".encode())
    places = {0: SAMPLED_NBYTES, max(nbytes - SAMPLED_NBYTES, 0): SAMPLED_NBYTES}
    places |= {nbytes * n // SAMPLES: 4096 for n in range(1, SAMPLES)}
    with path.open("rb") as file:
        for place, count in sorted(places.items()):
            file.seek(place)
            seen.update(file.read(count))
    return seen.digest()


def _megatron(index: Path, path: Path) -> str:
    """Name of the type of the tokens in ``path``, of which ``index`` tells.

    Raises:
        ValueError: the two do not fit together.
    """
    with open(open_regular(index), "rb") as file:
        head = file.read(MEGATRON_HEAD)
        if len(head) < MEGATRON_HEAD or not head.startswith(MEGATRON_MAGIC):
            raise ValueError(f"{index.name} beside it is no index of Megatron's form")
        version, sequences, documents = (
            int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26)
        )
        if version != 1 or head[17] not in MEGATRON_DTYPES:
            raise ValueError(
                f"{index.name} is of version {version} with dtype {head[17]}, expected version 1 with one of "
                f"{MEGATRON_DTYPES}"
            )
        if MEGATRON_HEAD + sequences * 12 + documents * 8 > index.stat().st_size:
            raise ValueError(f"{index.name} is cut short")
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
    name = MEGATRON_DTYPES[head[17]]
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(name).itemsize
    one_after_another = sequences and bool((pointers[1:] == ends[:-1]).all()) and pointers[0] == 0
    if not one_after_another or lengths.min() < 0 or ends[-1] != path.stat().st_size:
        raise ValueError(
            f"{index.name} tells of other tokens, or of sequences that are not one after another"
        )
    return name
