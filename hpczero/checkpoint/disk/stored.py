"""One checkpoint as one process reads it: elements in order, every slab checked against its digest.

Owns: reading without MPI, HDF5 or torch. Must not know: models, who wants the values, which checkpoint a path means. At
most two slabs are in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import (
    BUFFERS,
    MASTER,
    MOST,
    RNG,
    SEVERAL,
    STATE,
    STATE_FILE,
    Dataset,
    Manifest,
    digest,
    is_text,
    of_type,
    refuse,
    shape_of,
    whole,
)
from hpczero.checkpoint.disk.json_keys import extra_of, unmarked
from hpczero.checkpoint.disk.rawfile import read_at
from hpczero.errors import CorruptCheckpoint
from hpczero.files.regular import open_regular, reason, shown

ELEMENTS = "elements"
STREAMS = {"torch", "numpy", "python"}  # and those of a device

_NAMES = {
    1: (
        *("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    ),
    2: ("uint16", "int16", "float16", "bfloat16"),
    4: ("uint32", "int32", "float32", "complex32"),
    8: ("uint64", "int64", "float64", "complex64"),
    16: ("complex128",),
}
BUFFER_ITEMSIZES = {name: itemsize for itemsize, names in _NAMES.items() for name in names}


def check_content(manifest: Manifest, path: Path) -> None:
    """Refuse a manifest that a reader could not follow to its end.

    Raises:
        CorruptCheckpoint: the message names the checkpoint ``path``, the field, what it is and what was expected.
    """
    try:
        _check(manifest)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error


def _check(manifest: Manifest) -> None:
    meta, table = manifest.meta, manifest.table
    expected = {MASTER: ("<f4", table.numel), **_states(manifest)}
    buffers = of_type(meta, "buffers", list, "meta.")
    expected[BUFFERS] = ("|u1", _buffers_nbytes(buffers, manifest))
    rng = of_type(meta, "rng", list, "meta.")
    expected[RNG] = ("|u1", manifest.world_size * _stream_nbytes(rng, manifest.world_size))
    found = {dataset.name: (dataset.dtype, dataset.numel) for dataset in manifest.datasets}
    for name in expected.keys() | found.keys():
        if found.get(name) != expected.get(name):
            raise refuse(
                f"dataset {name}",
                found.get(name, "not there"),
                f"{expected.get(name, 'none of this name')}, as parameters, optimizer and buffers say",
            )
    whole(meta, "skipped_steps", "meta.")
    if "tensor" in meta and not whole(meta, "tensor", "meta."):
        raise refuse("meta.tensor", 0, "at least 1: how many ranks went on with one random stream")
    of_type(meta, "extra", dict, "meta.")
    _check_marks("meta.extra", lambda: extra_of(meta))
    states = of_type(meta, "extra_states", dict, "meta.") if "extra_states" in meta else {}
    for name, values in states.items():
        if not isinstance(values, list) or len(values) not in (1, manifest.world_size):
            raise refuse(f"meta.extra_states.{name}", values, "one, or one of every rank")
        _check_marks(f"meta.extra_states.{name}", lambda v=values: unmarked(v, "tuples"))  # type: ignore[misc]
    scale = of_type(meta, "loss_scale", dict, "meta.")
    if type(scale.get("scaled", True)) is not bool:
        raise refuse("meta.loss_scale.scaled", scale["scaled"], "true or false")
    if not _is_number(scale.get("scale")) or not 0 < scale["scale"] < math.inf:
        raise refuse("meta.loss_scale.scale", scale.get("scale"), "a number above 0")
    whole(scale, "good_steps", "meta.loss_scale.")


def _states(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """The datasets of the optimizer's state."""
    if "optimizer" not in manifest.meta:
        raise refuse("meta.optimizer", "not there", "an object or null")
    if manifest.meta["optimizer"] is None:
        return {}
    optimizer = of_type(manifest.meta, "optimizer", dict, "meta.")
    where = "meta.optimizer."
    of_type(optimizer, "class", str, where)
    if SEVERAL in optimizer:
        _check_several(optimizer, where)
    for group in of_type(optimizer, "groups", list, where):
        if type(group) is not dict:
            raise refuse(f"{where}groups", group, "objects")
        _check_marks(f"{where}groups", lambda group=group: unmarked(group))  # type: ignore[misc]
    kinds = of_type(optimizer, "kinds", dict, where)
    present = of_type(optimizer, "present", dict, where)
    if kinds.keys() != present.keys():
        raise refuse(f"{where}present", sorted(present), f"{sorted(kinds)}, as in kinds")
    names = {row.name for row in manifest.table.owners} | {"*"}
    for key, kind in kinds.items():
        if not (kind in (ELEMENTS, "bool", "int", "float") or _is_tensor(kind)):
            raise refuse(f"{where}kinds.{key}", kind, "elements, tensor:..., bool, int or float")
        values = of_type(present, key, dict, f"{where}present.")
        for name, value in values.items():
            if name not in names:
                raise refuse(f"{where}present.{key}", name, "names of parameters")
            if value is not None if kind == ELEMENTS else not _is_number(value):
                raise refuse(f"{where}present.{key}.{name}", value, f"what {kind} has")
    numel = manifest.table.trainable_numel
    return {STATE + key: ("<f4", numel) for key, kind in kinds.items() if kind == ELEMENTS}


def _check_several(optimizer: dict[str, Any], where: str) -> None:
    """Class and number of groups of each of several optimizers."""
    several = of_type(optimizer, SEVERAL, list, where)
    for entry in several:
        pair = isinstance(entry, list) and [type(part) for part in entry] == [str, int]
        if not pair or entry[1] < 0:
            raise refuse(f"{where}{SEVERAL}", entry, "a class and a number of groups")
    groups = of_type(optimizer, "groups", list, where)
    expected = sum(count for _, count in several)
    if len(several) < 2 or expected != len(groups):
        raise refuse(
            f"{where}{SEVERAL}",
            f"{len(several)} with {expected} groups",
            f"at least 2 with {len(groups)} groups, as in groups",
        )


def _check_marks(field: str, read: Callable[[], object]) -> None:
    try:
        read()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"manifest.json cannot be: {field} {error}") from error


def _is_tensor(kind: object) -> bool:
    return (
        isinstance(kind, str) and kind.removeprefix("tensor:") in BUFFER_ITEMSIZES and ":" in kind
    )


def _is_number(value: object) -> bool:
    return isinstance(value, bool | float) or (isinstance(value, int) and -MOST <= value <= MOST)


def _buffers_nbytes(buffers: list[Any], manifest: Manifest) -> int:
    nbytes = 0
    names = set()
    for entry in buffers:
        if not isinstance(entry, list) or len(entry) != 3 or type(entry[0]) is not str:
            raise refuse("a buffer", entry, "name, dtype, shape")
        name, dtype, sizes = entry
        if name in names or not is_text(name):
            raise refuse("a buffer", name, "each name once, of whole characters")
        names.add(name)
        shape = shape_of(sizes, f"{shown(name)}.shape")
        if dtype not in BUFFER_ITEMSIZES:
            raise refuse(f"{shown(name)}.dtype", dtype, f"one of {', '.join(BUFFER_ITEMSIZES)}")
        nbytes += prod(shape) * BUFFER_ITEMSIZES[dtype]
    return nbytes


def _stream_nbytes(rng: list[Any], world_size: int) -> int:
    """Bytes of one rank's random streams."""
    sizes: dict[str, int] = {}
    for entry in rng:
        if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not str:
            raise refuse("meta.rng", entry, "name and size")
        fields: Mapping[str, Any] = {entry[0]: entry[1]}
        sizes[entry[0]] = whole(fields, entry[0], "meta.rng.")
    if world_size and not sizes.keys() >= STREAMS:
        raise refuse("meta.rng", sorted(sizes), f"{', '.join(sorted(STREAMS))} and no name twice")
    return sum(sizes.values())


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
