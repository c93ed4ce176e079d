"""The tokens of one split, read at offsets. Each slab is checked against its digest when it is first touched.

Owns: reading, and the two checks: the digest, and that every id is one of the vocabulary. Must not know: HDF5, what the
tokens mean, batches. This reader does not check a sound slab again: from then on it reads only what is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpczero.data.appendix import SplitPart, Table, digest
from hpczero.errors import DataError
from hpczero.files.regular import reason

REMEDY = "prepare it anew with `python -m hpczero.data prepare`, or fetch another copy"

TokenArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class Slabs:
    """One split in an open file. Not collective; one thread at a time."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        name: str,
        part: SplitPart,
        table: Table,
        vocab_size: int,
    ) -> None:
        self._what = f"{path}: damaged: /{name}/tokens"
        self._descriptor = descriptor
        self._part = part
        self._places, self._digests = table[:, 0], table[:, 1]
        self.fingerprint = self._digests.tobytes()
        self._vocab_size = vocab_size
        self._sound = bytearray(part.num_slabs)
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(part.dtype).newbyteorder("<")
        self.numel = part.numel

    def read(self, start: int, stop: int) -> TokenArray:
        """(stop - start,) tokens.

        Raises:
            DataError: they are not those that were written, not of the vocabulary, or cannot be read.
        """
        found: TokenArray = np.empty(max(stop - start, 0), dtype=self.dtype)
        begin = start
        while begin < stop:
            index = begin // self._part.slab_numel
            slab = self._part.slab(index)
            end = min(stop, slab.stop)
            into = found[begin - start : end - start]
            if self._sound[index]:
                self._fill(into, index, begin - slab.start)
            else:
                into[:] = self._checked(index, slab)[begin - slab.start : end - slab.start]
            begin = end
        return found

    def check_all(self) -> None:
        """Read and check every slab.

        Raises:
            DataError: as ``read``, at the first slab that is not sound.
        """
        for index in range(self._part.num_slabs):
            self._checked(index, self._part.slab(index))

    def _checked(self, index: int, slab: range) -> TokenArray:
        data: TokenArray = np.empty(len(slab), dtype=self.dtype)
        self._fill(data, index, 0)
        if digest(data) != self._digests[index]:
            raise DataError(
                f"{self._what}[{slab.start}:{slab.stop}] do not have the digest they were written with; {REMEDY}"
            )
        check_ids(data, self._vocab_size, f"{self._what}[{slab.start}:{slab.stop}]")
        self._sound[index] = True
        return data

    def _fill(self, into: TokenArray, index: int, skip: int) -> None:
        """Read from token ``skip`` of a slab on."""
        left = into.data.cast("B")
        offset = int(self._places[index]) + skip * self.dtype.itemsize
        try:
            while left:
                count = os.preadv(self._descriptor, [left], offset)
                if not count:
                    raise DataError(f"{self._what}: the file ends at byte {offset}; {REMEDY}")
                left, offset = left[count:], offset + count
        except OSError as error:
            raise DataError(f"{self._what} cannot be read: {reason(error)}; {REMEDY}") from error


def check_ids(tokens: npt.NDArray[np.integer[Any]], vocab_size: int, what: str) -> None:
    """Refuse ids that are not of the vocabulary.

    Raises:
        DataError: the message names the largest.
    """
    if tokens.size and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{what} hold token id {largest}, and the vocabulary has {vocab_size} ids; {REMEDY}"
        )
