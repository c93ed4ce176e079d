"""Folders of torch.distributed.checkpoint (DCP), read without executing a pickle: tensors by name, in any ranges.

    .metadata       a pickle, written last: which tensors there are, and where the chunks of each lie
    __0_0.distcp    chunks and other values, each as torch.save writes it, end to end

A key is a way through nested dictionaries, which ``.metadata`` states beside it:

    ("model", NAME), (NAME,)                   a weight: in a state_dict of its own, or at the top (torchtitan)
    ("optim", "state", NAME, "exp_avg")        state, nested: torch.distributed.checkpoint.state_dict
    ("optimizer", "state.NAME.exp_avg")        state, flat: flatten_optimizer_state_dict (torchtitan)
    ("optim", "param_groups", 0, "lr")         options of a group, nested
    ("optimizer", "param_groups.NAME.lr")      options of a parameter's group, flat

Source: torch/distributed/checkpoint of torch 2.13: filesystem.py, metadata.py, default_planner.py, state_dict.py.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from hpczero.checkpoint.disk.format import plain_name, some
from hpczero.checkpoint.foreign.collected import Collected, Groups
from hpczero.checkpoint.foreign.weight_files import (
    BLOCK_NBYTES,
    NO_CHECKSUM,
    Box,
    HeldTensor,
    reading,
    runs,
)
from hpczero.errors import CheckpointError
from hpczero.files.direct import read_into
from hpczero.files.regular import is_there, opened, read_bytes, shown

METADATA = ".metadata"
MOST_NBYTES = 2**40  # of it
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
EXTRA = "_extra_state"  # what get_extra_state() gave

Key = tuple[str | int, ...]

_ADMITTED: dict[str, Any] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
}
_ADMITTED |= dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), PurePosixPath)
_ADMITTED |= {"torch.Size": torch.Size, "torch.serialization._get_layout": lambda _: torch.strided}


class _Metadata(pickle.Unpickler):
    """Makes what a ``.metadata`` consists of, and refuses every other name before anything is made of it."""

    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(read_bytes(file, MOST_NBYTES)))
        self._file = file

    @override
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if f"{module}.{name}" not in _ADMITTED:
            named = shown(f"{module}.{name}")
            raise CheckpointError(
                f"{self._file}: names {named}, which is no part of a checkpoint and may run a program; "
                "nothing was run. Do not use this checkpoint, unless its maker can say why that is there"
            )
        return _ADMITTED[f"{module}.{name}"]


class _Part(io.RawIOBase):
    """A part of a file as a file; torch has one, ``_ReaderView``, and that of 2.13 seeks from its end the wrong way."""

    def __init__(self, file: int, begin: int, nbytes: int) -> None:
        self._file, self._begin, self._nbytes, self._place = file, begin, nbytes, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._nbytes)[whence]
        return self._place

    @override
    def readinto(self, into: Any) -> int:
        most = max(min(len(into), self._nbytes - self._place), 0)
        found = os.preadv(self._file, [memoryview(into)[:most]], self._begin + self._place)
        self._place += found
        return found


class _Entry:
    """What ``torch.save`` wrote to a part of a file."""

    def __init__(self, folder: Path, key: str, info: Any) -> None:
        self._file, self._begin, self._nbytes = (
            folder / info.relative_path,
            info.offset,
            info.length,
        )
        self._key = key
        if self._file.parent != folder or getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{key!r} lies in {info.relative_path!r}, expected a plain file beside it"
            )

    @contextmanager
    def _part(self) -> Iterator[tuple[int, IO[bytes]]]:
        """The file, and the part as a file of its own. Errors become CheckpointError."""
        remedy = "copy the folder again, or save it anew with torch.distributed.checkpoint"
        with (
            reading(self._file, f"damaged at {self._key!r}, or not of torch.save", remedy),
            opened(self._file) as file,
        ):
            yield file, io.BufferedReader(_Part(file, self._begin, self._nbytes))

    def value(self) -> Any:
        """The value, if ``weights_only`` admits it. Raises CheckpointError."""
        with self._part() as (_, part):
            return torch.load(part, map_location="cpu", weights_only=True)

    def check(self) -> None:
        """Compare the bytes with their checksums. Raises CheckpointError."""
        with self._part() as (_, part), zipfile.ZipFile(part) as archive:
            for entry in archive.infolist():
                if entry.CRC != NO_CHECKSUM:
                    with archive.open(entry) as data:
                        while data.read(BLOCK_NBYTES):
                            pass

    @cached_property
    def _fake(self) -> Tensor:
        """The tensor without its values, whose storage says where they are."""
        with FakeTensorMode():
            found: Tensor = self.value()
        with self._part() as (_, part), zipfile.ZipFile(part) as archive:
            held = [info.file_size for info in archive.infolist() if "/data/" in info.filename]
            if held != [found.untyped_storage().nbytes()]:
                raise ValueError(f"its values take {held} bytes, and its storage says otherwise")
        return found

    def box(self, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A box of the tensor of this shape and dtype, with slices of all dimensions. Raises CheckpointError."""
        fake = self._fake
        if (tuple(fake.shape), fake.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{self._file}: {self._key!r} is {tuple(fake.shape)} {fake.dtype} there, and {METADATA} says {shape} "
                f"{dtype}; copy the folder again, or save it anew"
            )
        if not fake.is_contiguous():
            return cast("Tensor", self.value()[box])
        begin = self._begin + (fake.untyped_storage()._checkpoint_offset or 0)
        ranges = [range(own.start, own.stop) for own in box]
        into, done = np.empty(prod(map(len, ranges)) * fake.itemsize, dtype=np.uint8), 0
        with self._part() as (file, _):
            for run in runs(tuple(fake.shape), ranges):
                place = (fake.storage_offset() + run.start) * fake.itemsize
                nbytes = len(run) * fake.itemsize
                read_into(file, begin + place, into[done : done + nbytes])
                done += nbytes
        return torch.from_numpy(into).view(fake.dtype).view([*map(len, ranges)])


class DcpFolder(Collected):
    """A folder of DCP: weights, and state of the optimizer if there is one."""

    def __init__(self, path: Path, *, with_state: bool = True) -> None:
        """Read ``.metadata``; no values are read yet. ``with_state`` takes the optimizer's state too.

        Raises:
            CheckpointError: it cannot be read, names what is no part of a checkpoint, or holds no weights.
            CheckpointMismatch: a state of the optimizer has another shape than its parameter.
        """
        file = path / METADATA
        if not is_there(file):
            raise CheckpointError(
                f"{path}: has no {METADATA}, which torch.distributed.checkpoint writes last: the save did not come to "
                "its end, or a part of the folder was copied; take another checkpoint"
            )
        values: dict[Key, HeldTensor | _Entry] = {}
        remedy = "save it anew with torch.distributed.checkpoint"
        with reading(file, "no metadata of torch.distributed.checkpoint", remedy):
            told = _Metadata(file).load()
            self._entries = {i: _Entry(path, i.fqn, info) for i, info in told.storage_data.items()}
            for name, kind in told.state_dict_metadata.items():
                is_tensor = isinstance(kind, metadata.TensorStorageMetadata)
                way = tuple((told.planner_data or {}).get(name, (name,)))
                index = metadata.MetadataIndex(name)
                if not way or not (is_tensor or index in self._entries):
                    raise ValueError(f"{name!r} lies nowhere")
                values[way] = self._held(path, name, kind) if is_tensor else self._entries[index]
            roles = {way: _role(way) for way in values}
        tensors = {way: held for way, held in values.items() if isinstance(held, HeldTensor)}
        parents = list(dict.fromkeys(way[:-1] for way in tensors if not roles[way]))
        named = sorted((one for one in parents if one and one[-1] in MODEL_KEYS), key=len)
        models = [one for one in named if len(one) == len(named[0])]
        optimizers = sorted({_above(way) for way, role in roles.items() if role and with_state})
        for several, remedy in (
            (models, "save each into a folder of its own"),
            (optimizers, "save each into a folder of its own, or give --optimizer None"),
        ):
            if len(several) > 1:
                ways = some([".".join(map(str, way)) for way in several])
                raise CheckpointError(
                    f"{path}: holds several models or optimizers ({ways}), and an import makes one checkpoint of one; "
                    f"{remedy}"
                )
        parent = parents[0] if len(parents) == 1 else [*named, ()][0]
        own = {
            way
            for way in tensors
            if not roles[way] and way[:-1] == parent and not str(way[-1]).endswith(EXTRA)
        }
        weights = {plain_name(str(way[-1])): held for way, held in tensors.items() if way in own}
        if len(weights) < len(own):
            raise CheckpointError(
                f"{path}: two of its keys name one weight, where prefixes of wrappers ('_orig_mod.') are left out; "
                "save the model's own state_dict"
            )
        if not weights:
            raise CheckpointError(
                f"{path}: no weights there; expected keys 'model.NAME' or 'NAME', and it has "
                f"{some(['.'.join(map(str, way)) for way in tensors]) or 'no tensors'}"
            )
        states: dict[str, dict[str, HeldTensor]] = {}
        for way in (way for way in values if with_state and roles[way] == "state"):
            name, key = _state_key(way)
            if way not in tensors:
                raise CheckpointError(
                    f"{path}: {'.'.join(map(str, way))} is no tensor; expected the state of torch's optimizers, whose "
                    "steps are tensors, or take the weights alone (--optimizer None)"
                )
            states.setdefault(name, {})[key] = tensors[way]
        super().__init__(path, weights, states)
        self._options = {way: held for way, held in values.items() if roles[way] == "param_groups"}
        others = (
            way
            for way in values
            if (not roles[way] and way not in own) or (with_state and not states and roles[way])
        )
        self.left = [".".join(map(str, way)) for way in others]

    def _held(self, path: Path, name: str, told: Any) -> HeldTensor:
        """One tensor, whose chunks ``told`` names."""
        shape, dtype, label = tuple(told.size), told.properties.dtype, f"{path}: {name!r}"
        chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in told.chunks}
        if any(n < 0 for sizes in (shape, *chunks.values()) for n in sizes):
            raise ValueError(f"{name!r} has a negative size")

        def read(box: Box) -> Tensor:
            whole = (*box, *[slice(None)] * (len(shape) - len(box)))
            wanted = [range(*own.indices(n)) for own, n in zip(whole, shape, strict=True)]
            sizes = torch.Size(map(len, wanted))
            chunk = metadata.ChunkStorageMetadata(torch.Size(own.start for own in wanted), sizes)
            found, filled = torch.empty(sizes, dtype=dtype, device="cpu"), 0
            there = torch.zeros(sizes, dtype=torch.bool, device="cpu")
            for item in (
                create_read_items_for_chunk_list(name, told, [chunk]) if sizes.numel() else ()
            ):
                into, of = (
                    tuple(slice(b, b + n) for b, n in zip(begins, item.lengths, strict=True))
                    for begins in (item.dest_offsets, item.storage_offsets)
                )
                index = item.storage_index
                if index not in self._entries:
                    raise CheckpointError(
                        f"{label}: a chunk is in no file; the checkpoint is not whole"
                    )
                chunk_shape = chunks[tuple(index.offset or ())]
                found[into] = self._entries[index].box(of, chunk_shape, dtype)
                there[into] = True
                filled += prod(item.lengths)
            if filled != found.numel() or not there.all():
                raise CheckpointError(
                    f"{label}: its chunks overlap or leave gaps: they have {filled:,} of {found.numel():,} elements; "
                    "the checkpoint is not whole"
                )
            return found

        return HeldTensor(shape, dtype, False, read, label=label)

    @override
    def groups(self) -> Groups:
        nested: dict[str, Any] = {}
        flat: dict[str, dict[str, Any]] = {}
        for way, held in self._options.items():
            value = held.whole() if isinstance(held, HeldTensor) else held.value()
            if "param_groups" in way:
                set_element(nested, way[way.index("param_groups") :], value)
            else:
                name, _, option = str(way[-1]).removeprefix("param_groups.").rpartition(".")
                flat.setdefault(plain_name(name), {})[option] = value
        groups: list[dict[str, Any]] = nested.get("param_groups", [])
        if groups:
            named = [list(map(str, group.pop("params", ()))) for group in groups]
            return groups, {plain_name(n): i for i, names in enumerate(named) for n in names}
        for options in flat.values():
            groups += [options] if options not in groups else []
        places = {name: groups.index(options) for name, options in flat.items()}
        return groups or [{}], places or dict.fromkeys(self.states, 0)

    @override
    def check(self, part: int, parts: int) -> None:
        for entry in list(self._entries.values())[part::parts]:
            entry.check()


def is_dcp(path: Path) -> bool:
    """Whether ``path`` is a folder of DCP, whole or not. Raises OSError: the system does not say."""
    return path.is_dir() and any(
        entry.name == METADATA or entry.suffix == ".distcp" for entry in path.iterdir()
    )


def _role(way: Key) -> str:
    """``state`` or ``param_groups``, of an optimizer, whose keys are nested or flat; empty for others."""
    for role in ("state", "param_groups"):
        flat = len(way) > 1 and way[-2] not in MODEL_KEYS and str(way[-1]).startswith(f"{role}.")
        if flat or role in way[:-2]:
            return role
    return ""


def _above(way: Key) -> tuple[str, ...]:
    """The way to the optimizer that a state or an option is of."""
    nested = next((way.index(role) for role in ("state", "param_groups") if role in way[:-2]), None)
    return tuple(map(str, way[:-1] if nested is None else way[:nested]))


def _state_key(way: Key) -> tuple[str, str]:
    """Name of the parameter, and key of its state."""
    if "state" in way[:-2]:
        place = way.index("state")
        name, key = str(way[place + 1]), ".".join(map(str, way[place + 2 :]))
    else:
        name, _, key = str(way[-1]).removeprefix("state.").rpartition(".")
    if name.isdigit():
        raise CheckpointError(
            f"{'.'.join(map(str, way))}: names a parameter by its number, which depends on the program; save what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, or take the weights alone "
            "(--optimizer None)"
        )
    return plain_name(name), key
