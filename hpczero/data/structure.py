"""HDF5's part of a token file: its structures are made in memory, around tokens that are in the file already.

Owns: where the tokens of each split lie, and all bytes that HDF5 would write around them. Must not know: who writes,
what the tokens mean.

[Note: Tokens before structures]
How many tokens a text has is known when the last of it is tokenized. Its tokens are written before, by many ranks, to
the places where HDF5 will look for them. The tokens of a split are one contiguous dataset. HDF5 puts it at the next
multiple of ``PAGE`` once the objects before it have their room, whatever its size. The first place is therefore known
from the start, and the second once all training tokens are counted. Making the structures for a length of one tells
both. At the end they are made for the true lengths, and must give the same places.

[Note: HDF5 never sees a disk that is full]
HDF5 1.10 crashes the process when it closes a file that it could not write. It therefore writes to memory.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpczero.data.appendix import SPLITS
from hpczero.errors import DataError

PAGE = 4096


@dataclass(frozen=True)
class Dataset:
    """The tokens of one split.

    Attributes:
        numel: number of tokens.
        attributes: of its group.
    """

    numel: int
    attributes: Mapping[str, int]


@dataclass(frozen=True)
class Structure:
    """What HDF5 has in a file.

    Attributes:
        places: where the tokens of each split begin, in bytes.
        pieces: place and bytes of all the rest.
        nbytes: length of HDF5's part of the file.
    """

    places: tuple[int, ...]
    pieces: tuple[tuple[int, bytes], ...]
    nbytes: int


def made(
    dtype: np.dtype[Any], datasets: tuple[Dataset, ...], attributes: Mapping[str, str | int]
) -> Structure:
    """The structures of a file.

    Args:
        dtype: of a token.
        datasets: of the splits, in the order of ``SPLITS``.
        attributes: of the file.
    """
    import h5py

    memory, places = _Memory(), []
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)  # equal text makes equal files
    # The newest form of its structures: they have checksums, which other readers hold them against.
    aligned = {"alignment_threshold": 1, "alignment_interval": PAGE}
    with h5py.File(memory, "w", libver=("v110", "v110"), **aligned) as file:
        kind = h5py.h5t.py_create(dtype.newbyteorder("<"))
        groups = [file.create_group(name) for name in SPLITS]
        for group, dataset in zip(groups, datasets, strict=True):
            space = h5py.h5s.create_simple((dataset.numel,))
            tokens = h5py.h5d.create(group.id, b"tokens", kind, space, settings)
            places.append(int(tokens.get_offset()))
        # After the datasets, whose places shall not depend on their length.
        for group, dataset in zip(groups, datasets, strict=True):
            group.attrs.update(dataset.attributes)
        file.attrs.update(attributes)
    return Structure(tuple(places), tuple(memory.written), memory.nbytes)


def places(dtype: np.dtype[Any], train_numel: int) -> tuple[int, ...]:
    """Where the tokens of each split begin, whatever comes later ([Note: Tokens before structures])."""
    counts = {"documents": 0, "text_nbytes": 0}
    return made(dtype, (Dataset(train_numel, counts), Dataset(1, counts)), {}).places


def check_places(found: Structure, expected: tuple[int, ...]) -> None:
    """Refuse structures that look for tokens elsewhere than where they were written.

    Raises:
        DataError: this HDF5 does not lay out a file as those do that were tried.
    """
    if found.places != expected:
        import h5py

        raise DataError(
            f"HDF5 {h5py.version.hdf5_version} looks for tokens at {found.places}, and they were written at "
            f"{expected}: this version of HDF5 cannot be used here; please report it"
        )


class _Memory(io.RawIOBase):
    """A sparse file that keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self.nbytes = 0
        self._pages: dict[int, bytearray] = {}
        self._place = 0

    def write(self, data: Any) -> int:
        mine = bytes(memoryview(data).cast("B"))
        self.written.append((self._place, mine))
        for begin, page, skip, count in self._spans(len(mine)):
            self._pages.setdefault(page, bytearray(PAGE))[skip : skip + count] = mine[
                begin : begin + count
            ]
        self._place += len(mine)
        self.nbytes = max(self.nbytes, self._place)
        return len(mine)

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        for begin, page, skip, count in self._spans(len(view)):
            view[begin : begin + count] = self._pages.get(page, bytes(PAGE))[skip : skip + count]
        self._place += len(view)
        return len(view)

    def _spans(self, nbytes: int) -> list[tuple[int, int, int, int]]:
        """(begin, page, skip, count) for each page that ``nbytes`` from here on touch."""
        spans, begin = [], 0
        while begin < nbytes:
            page, skip = divmod(self._place + begin, PAGE)
            count = min(PAGE - skip, nbytes - begin)
            spans.append((begin, page, skip, count))
            begin += count
        return spans

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.nbytes}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def truncate(self, nbytes: int | None = None) -> int:
        self.nbytes = self._place if nbytes is None else nbytes
        return self.nbytes

    def flush(self) -> None:
        pass
