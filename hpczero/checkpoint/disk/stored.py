"""One checkpoint as one process reads it: elements in order, every slab checked against its digest.

Needs neither MPI, HDF5 nor torch. At most two slabs are in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.json_keys import extra_of, unmarked
from hpczero.errors import CorruptCheckpoint
from hpczero.files.direct import read_at
from hpczero.files.regular import WHY, Closing, Explained, open_regular

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

# Fields of ``meta``, as RULES of the format.
RULES: dict[str, on_disk.Kind] = {
    "buffers": list,
    "buffers.*": 3,
    "buffers.*.0": str,
    "buffers.*.1": str,
    "buffers.*.2": list,
    "buffers.*.2.*": on_disk.COUNT,
    "rng": list,
    "rng.*": 2,
    "rng.*.0": str,
    "rng.*.1": on_disk.COUNT,
    "skipped_steps": on_disk.COUNT,
    "optimizer_steps?": on_disk.COUNT,  # which draw the codes of gradients between nodes
    "tensor?": (1, on_disk.MOST),  # how many ranks went on with one random stream
    "extra": dict,
    "extra_states?": dict,
    "extra_states?.*": list,
    "loss_scale": dict,
    "loss_scale.scaled?": bool,
    "loss_scale.good_steps": on_disk.COUNT,
    "optimizer?": dict,
    "optimizer?.class": str,
    "optimizer?.groups": list,
    "optimizer?.groups.*": dict,
    "optimizer?.kinds": dict,
    "optimizer?.kinds.*": str,
    "optimizer?.present": dict,
    "optimizer?.present.*": dict,
    f"optimizer?.{on_disk.SEVERAL}?": list,
    f"optimizer?.{on_disk.SEVERAL}?.*": 2,
    f"optimizer?.{on_disk.SEVERAL}?.*.0": str,
    f"optimizer?.{on_disk.SEVERAL}?.*.1": on_disk.COUNT,
}


def check_content(manifest: on_disk.Manifest, path: Path) -> None:
    """Refuse a manifest that a reader could not follow to its end.

    Raises:
        CorruptCheckpoint: the message names the checkpoint ``path``, the field, what it is and what was expected.
    """
    try:
        _check(manifest)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error


def _check(manifest: on_disk.Manifest) -> None:
    meta, table, ranks = manifest.meta, manifest.table, manifest.world_size
    on_disk.check_rules(meta, RULES, "meta.")
    expected = {
        on_disk.MASTER: ("<f4", table.numel),
        on_disk.BUFFERS: ("|u1", _buffers_nbytes(meta["buffers"])),
        on_disk.RNG: ("|u1", ranks * sum(nbytes for _, nbytes in meta["rng"])),
    }
    on_disk.expect("optimizer" in meta, "meta.optimizer", "not there", "an object or null")
    if meta["optimizer"] is not None:
        expected |= _states(manifest)
    found = {dataset.name: (dataset.dtype, dataset.numel) for dataset in manifest.datasets}
    for name in expected.keys() | found.keys():
        got, wanted = found.get(name, "not there"), expected.get(name, "none of this name")
        why = f"{wanted}, as parameters, optimizer and buffers say"
        on_disk.expect(got == wanted, f"dataset {name}", got, why)
    names = [name for name, _ in meta["rng"]]
    on_disk.check_names("meta.rng", names)
    on_disk.expect(
        not ranks or set(names) >= STREAMS, "meta.rng", names, f"{sorted(STREAMS)} at least"
    )
    _check_marks("meta.extra", lambda: extra_of(meta))
    for name, values in meta.get("extra_states", {}).items():
        sound = len(values) in (1, ranks)
        on_disk.expect(sound, f"meta.extra_states.{name}", values, "one, or one of every rank")
        _check_marks(f"meta.extra_states.{name}", partial(unmarked, values, "tuples"))
    scale = meta["loss_scale"].get("scale")
    sound = _is_number(scale) and 0 < scale < math.inf
    on_disk.expect(sound, "meta.loss_scale.scale", scale, "a number above 0")


def _states(manifest: on_disk.Manifest) -> dict[str, tuple[str, int]]:
    optimizer, where = manifest.meta["optimizer"], "meta.optimizer."
    groups, kinds, present = (optimizer[key] for key in ("groups", "kinds", "present"))
    if several := optimizer.get(on_disk.SEVERAL):
        got = f"{len(several)} with {sum(count for _, count in several)} groups"
        sound = len(several) >= 2 and sum(count for _, count in several) == len(groups)
        wanted = f"at least 2 with {len(groups)} groups, as in groups"
        on_disk.expect(sound, f"{where}{on_disk.SEVERAL}", got, wanted)
    for group in groups:
        _check_marks(f"{where}groups", partial(unmarked, group))
    sound = kinds.keys() == present.keys()
    on_disk.expect(sound, f"{where}present", sorted(present), f"{sorted(kinds)}, as in kinds")
    names = {row.name for row in manifest.table.owners} | {"*"}
    for key, kind in kinds.items():
        sound = kind in (ELEMENTS, "bool", "int", "float") or (
            kind.startswith("tensor:") and kind.removeprefix("tensor:") in BUFFER_ITEMSIZES
        )
        known = "elements, tensor:..., bool, int or float"
        on_disk.expect(sound, f"{where}kinds.{key}", kind, known)
        for name, value in present[key].items():
            on_disk.expect(name in names, f"{where}present.{key}", name, "names of parameters")
            sound = value is None if kind == ELEMENTS else _is_number(value)
            on_disk.expect(sound, f"{where}present.{key}.{name}", value, f"what {kind} has")
    numel = manifest.table.trainable_numel
    return {on_disk.STATE + key: ("<f4", numel) for key, kind in kinds.items() if kind == ELEMENTS}


def _check_marks(field: str, read: Callable[[], object]) -> None:
    try:
        read()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"manifest.json cannot be: {field} {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, bool | float) or (
        isinstance(value, int) and -on_disk.MOST <= value <= on_disk.MOST
    )


def _buffers_nbytes(buffers: Sequence[Any]) -> int:
    on_disk.check_names("a buffer", [name for name, _, _ in buffers])
    for name, dtype, shape in buffers:
        known = f"one of {', '.join(BUFFER_ITEMSIZES)}"
        on_disk.expect(dtype in BUFFER_ITEMSIZES, f"{name}.dtype", dtype, known)
        on_disk.expect(len(shape) <= on_disk.MOST_DIMS, f"{name}.shape", shape, "a list of sizes")
    return sum(prod(shape) * BUFFER_ITEMSIZES[dtype] for _, dtype, shape in buffers)


Array = npt.NDArray[Any]


class Stored(Closing):
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
        # The last one read: small tensors share it
        self._slab: tuple[str, int, Array] | None = None
        with Explained(CorruptCheckpoint, f"{path}: {on_disk.STATE_FILE} cannot be read ({WHY})"):
            self._descriptor = open_regular(path / on_disk.STATE_FILE)

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

    def _read_slab(self, dataset: on_disk.Dataset, index: int) -> Array:
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
        if on_disk.digest(data) != dataset.digests[index]:
            raise CorruptCheckpoint(self.manifest.damage(self.path, dataset, slab))
        self._slab = dataset.name, index, data.view(np.dtype(dataset.dtype))
        return self._slab[2]

    def close(self) -> None:
        """Close the checkpoint; nothing can be read any more."""
        os.close(self._descriptor)
