"""One checkpoint as one process reads it: elements in order, every slab checked against its digest.

Owns: reading without MPI, HDF5 or torch. Must not know: models, who wants the values, which checkpoint a path means. At
most two slabs are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import STATE_FILE, Dataset, digest
from hpczero.checkpoint.disk.manifest_content import check_content
from hpczero.checkpoint.disk.rawfile import read_at
from hpczero.errors import CorruptCheckpoint
from hpczero.files.regular import open_regular, reason

Array = npt.NDArray[Any]


class Stored:
    """A checkpoint, open for reading. Use it as a context manager, or close it.

    Attributes:
        path: its folder.
        manifest: what it holds.
    """

    def __init__(self, path: Path) -> None:
        """Open a checkpoint; no data are read yet.

        Raises:
            CorruptCheckpoint: its manifest or the size of its file is wrong, or it cannot be read.
            CheckpointMismatch: a later version wrote it.
        """
        self.path = path
        self.manifest = read_manifest(path)
        check_content(self.manifest, path)
        self.manifest = self.manifest.plain()
        self._slab: tuple[str, int, Array] | None = (
            None  # the last one read: small tensors share it
        )
        try:
            self._descriptor = open_regular(path / STATE_FILE)
        except OSError as error:
            raise CorruptCheckpoint(
                f"{path}: {STATE_FILE} cannot be read ({reason(error)})"
            ) from error

    def read(self, name: str, start: int, stop: int) -> Iterator[Array]:
        """Elements [start, stop) of dataset ``name`` in pieces, in order. A piece is valid until the next one.

        Raises:
            CorruptCheckpoint: the message names dataset, parameters and range.
        """
        dataset = self.manifest.dataset(name)
        if dataset is None:
            raise CorruptCheckpoint(f"{self.path}: dataset {name} is not in it")
        while start < stop:
            index = start // dataset.slab_numel
            slab = dataset.slab(index)
            end = min(stop, slab.stop)
            yield self._read_slab(dataset, index)[start - slab.start : end - slab.start]
            start = end

    def _read_slab(self, dataset: Dataset, index: int) -> Array:
        if self._slab is not None and self._slab[:2] == (dataset.name, index):
            return self._slab[2]
        self._slab = None  # first: two slabs need not fit
        slab = dataset.slab(index)
        offset = dataset.offset + slab.start * dataset.itemsize
        try:
            data = read_at(self._descriptor, offset, len(slab) * dataset.itemsize)
        except (OSError, EOFError) as error:
            raise CorruptCheckpoint(
                f"{self.path}: {dataset.name} cannot be read: {error}"
            ) from error
        if digest(data) != dataset.digests[index]:
            raise CorruptCheckpoint(self.manifest.damage(self.path, dataset, slab))
        self._slab = dataset.name, index, data.view(np.dtype(dataset.dtype))
        return self._slab[2]

    def close(self) -> None:
        """Close the checkpoint; nothing can be read any more."""
        os.close(self._descriptor)

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
