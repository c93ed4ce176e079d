"""Weights that other programs wrote: tensors by name, of which any range of elements can be read.

Formats are safetensors and files of ``torch.save`` (read with ``weights_only``), one file or many with an index.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor, serialization

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk.format import plain_name
from hpczero.checkpoint.foreign.safe_file import DTYPES, digests_of, tensor_digest
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, launcher_rank
from hpczero.files.direct import read_into
from hpczero.files.regular import (
    WHY,
    Explained,
    check_regular,
    open_regular,
    parse_json,
    read_text,
    reason,
)

BLOCK_NBYTES = 2**22
# By torch.save, where torch.serialization.set_crc32_options(False) says so.
NO_CHECKSUM = 0


class _Unknown:
    """In the place of an object of a class that torch does not know."""

    def __init__(self, *parts: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class TorchFile:
    """One file of a ``state_dict``, mapped into memory as long as this object lives.

    Attributes:
        tensors: tensors by name.
        content: what the file holds.
        has_checksums: whether damage to its values can be seen.
    """

    def __init__(self, file: Path, *, any_content: bool = False) -> None:
        """Open a file. Only the part that says where the values are is checked against its checksums here.

        With ``any_content`` it need not hold tensors alone. Objects of classes that torch does not know are then
        without content: their classes are not looked for.

        Raises:
            CheckpointError: it is damaged, not of torch.save, or holds other things than tensors of plain memory.
        """
        self._file = file
        self._values: list[str] = []
        self.has_checksums = True
        self._open()
        with (
            reading(
                file,
                "torch.load cannot read it with weights_only=True and mmap=True",
                "write the state_dict anew with torch.save of a recent torch",
            ),
            warnings.catch_warnings(),
        ):  # of tensors in beta state, which are refused below
            warnings.simplefilter("ignore", UserWarning)
            unknown = serialization.get_unsafe_globals_in_checkpoint(file) if any_content else []
            with serialization.safe_globals([(_Unknown, name) for name in unknown]):
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        self.content = content
        self.tensors: dict[str, Tensor] = {}
        if any_content:
            return
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{file}: holds a {type(content).__name__}, expected a state_dict"
            )
        self.tensors = {str(key): self._plain(key, value) for key, value in content.items()}

    def check(self, part: int, parts: int) -> None:
        """Check the values against their checksums. Each of ``parts`` readers takes its share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        if self.has_checksums:
            self._read(self._values[part::parts])

    def _open(self) -> None:
        what = "no file of torch.save, or damaged"
        remedy = "fetch it again, or write it anew with torch.save of a recent torch"
        with reading(self._file, what, remedy), zipfile.ZipFile(self._file) as archive:
            entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if len(set(names)) < len(names) or any(entry.compress_type for entry in entries):
            raise CheckpointError(
                f"{self._file}: no file of torch.save: it is compressed, or has one name twice"
            )
        # The root is named as the file was; the values are <root>/data/<number>.
        self._values = [name for name in names if name.split("/")[-2:-1] == ["data"]]
        self.has_checksums = any(entry.CRC != NO_CHECKSUM for entry in entries)
        if self.has_checksums:
            self._read([name for name in names if name not in set(self._values)])

    def _read(self, names: list[str]) -> None:
        """Read to the end, where zipfile compares the checksum."""
        with (
            reading(self._file, "damaged", "fetch it again"),
            zipfile.ZipFile(self._file) as archive,
        ):
            for name in names:
                with (
                    reading(self._file, f"damaged at {name!r}", "fetch it again"),
                    archive.open(name) as entry,
                ):
                    while entry.read(BLOCK_NBYTES):
                        pass

    def _plain(self, key: object, value: object) -> Tensor:
        """``value``, if it is a tensor whose elements all exist; refuses others."""
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{self._file}: {key!r} is a {type(value).__name__}, expected tensors only; save the state_dict of the "
                "model alone, as torch.save(model.state_dict(), path)"
            )
        kind = None
        if value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        elif value.is_quantized or value.is_meta:
            kind = "quantized" if value.is_quantized else "without values (on the meta device)"
        if kind is not None:
            raise CheckpointError(
                f"{self._file}: {key!r} is {kind}, expected a tensor of plain memory; convert it, as with "
                "to_dense() or dequantize(), and save it again"
            )
        return value.detach()


@contextmanager
def reading(file: Path, what: str, remedy: str) -> Iterator[None]:
    """Errors become CheckpointError: those of the machine, which another file would meet too, and all others."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {reason(error)}") from error
    except Exception as error:  # of a damaged archive or pickle, anything
        why = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        if isinstance(error, MemoryError):
            raise CheckpointError(f"{file}: cannot be read: out of memory: {why}") from error
        raise CheckpointError(f"{file}: {what}: {why}; {remedy}") from error


# RangeFile: one safetensors file of which any range of elements is read, by pread.
#
#     8 bytes: size of the header | header: JSON | tensors, end to end

CHUNK_NBYTES = 2**22  # read at a time
SAMPLES, SAMPLE_NBYTES = 16, 64  # of the values, compared between nodes

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, n) for n, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: the name of its dtype there, its shape, and the first byte in the file."""

    code: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return _DTYPES[self.code]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class RangeFile:
    """One safetensors file, open for reading as long as this object lives.

    Attributes:
        path: of the file.
        entries: its tensors, by key.
        metadata: texts beside them.
        digests: of the tensors; None if the file states none.
        nbytes_read: bytes of values that were read so far.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and check its header.

        No values are read. Raises CheckpointError: it cannot be read, or is damaged.
        """
        self.path = path
        self.nbytes_read = 0
        with Explained(CheckpointError, f"{path}: {WHY}"):
            self._file = open_regular(path)
        weakref.finalize(self, os.close, self._file)
        self._nbytes = os.fstat(self._file).st_size
        wrong = "no safetensors file, or damaged or torn"
        with reading(path, wrong, "fetch it again"), safe_open(path, framework="np"):
            pass  # the library has checked header and length
        header = self._bytes(8, int.from_bytes(self._bytes(0, 8).tobytes(), "little"))
        self._begin = 8 + len(header)
        self._checksum = zlib.crc32(header.data)
        content = json.loads(header.tobytes())
        self.metadata: dict[str, str] = content.pop("__metadata__", None) or {}
        self.entries: dict[str, FileTensor] = {}
        for key, said in content.items():
            if said["dtype"] not in _DTYPES:
                raise CheckpointError(
                    f"{path}: {key!r} is {said['dtype']}, expected one of {', '.join(_DTYPES)}; convert it"
                )
            begin = self._begin + said["data_offsets"][0]
            self.entries[key] = FileTensor(said["dtype"], tuple(said["shape"]), begin)
        try:
            self.digests = digests_of(self.metadata, self.entries)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def pieces(self, key: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop), flat, in the dtype of the file, in pieces. Each is valid until the next."""
        entry = self.entries[key]
        itemsize = entry.dtype.itemsize
        step = CHUNK_NBYTES // itemsize
        buffer = torch.empty(min(step, stop - start) * itemsize, dtype=torch.uint8, device="cpu")
        for first in range(start, stop, step):
            part = buffer[: (min(first + step, stop) - first) * itemsize]
            self._read(part.numpy(), entry.begin + first * itemsize)
            self.nbytes_read += len(part)
            yield part.view(entry.dtype)

    def box(self, key: str, box: Sequence[slice] = ()) -> Tensor:
        """A part of a tensor, in the dtype of the file: slices of its leading dimensions; without any all of it."""
        entry = self.entries[key]
        shape, itemsize = entry.shape, entry.dtype.itemsize
        places = [range(*own.indices(length)) for own, length in zip(box, shape, strict=False)]
        places += map(range, shape[len(box) :])
        lengths = [len(own) for own in places]
        into, done = np.empty(prod(lengths) * itemsize, dtype=np.uint8), 0
        for run in runs(shape, places) if into.size else ():
            nbytes = len(run) * itemsize
            self._read(into[done : done + nbytes], entry.begin + run.start * itemsize)
            done += nbytes
        self.nbytes_read += done
        if not done:
            return torch.empty(lengths, dtype=entry.dtype, device="cpu")
        return torch.from_numpy(into).view(entry.dtype).view(lengths)

    def checked(self, key: str) -> Tensor:
        """A whole tensor, compared with the digest that the file states, if it does.

        Raises:
            CheckpointError: it is damaged.
        """
        found = self.box(key)
        self._compare(key, [found])
        return found

    def fingerprint(self) -> str:
        """A line that differs for other files, by all of the header and a few of the values."""
        data = self._nbytes - self._begin
        places = {data * index // SAMPLES for index in range(SAMPLES)} if data else set()
        found = self._checksum
        for place in sorted(places):
            part = self._bytes(self._begin + place, min(SAMPLE_NBYTES, data - place))
            found = zlib.crc32(part.data, found)
        return f"{self.path.name} {self._nbytes} {found:08x}"

    def check(self, part: int, parts: int) -> None:
        """Check values against the digests that the file states, if it does. Each of ``parts`` readers takes a share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        for key in list(self.entries)[part::parts] if self.digests is not None else ():
            self._compare(key, self.pieces(key, 0, self.entries[key].numel))

    def _compare(self, key: str, pieces: Iterable[Tensor]) -> None:
        if self.digests is not None:
            entry = self.entries[key]
            flat = (piece.reshape(-1).view(torch.uint8).numpy() for piece in pieces)
            if tensor_digest(entry.code, entry.shape, flat) != self.digests[key]:
                raise self._damaged(f"{key!r} does not have the digest it was written with")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged: {what}; fetch it again")

    def _bytes(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        found = np.empty(nbytes, dtype=np.uint8)
        self._read(found, begin)
        return found

    def _read(self, into: npt.NDArray[np.uint8], begin: int) -> None:
        try:
            read_into(self._file, begin, into)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from error
        except EOFError as error:
            raise self._damaged(str(error)) from error


def runs(shape: Sequence[int], box: Sequence[range]) -> Iterator[range]:
    """The elements of a box as flat ranges of a tensor of ``shape``, in order; as few as there are."""
    depth = len(shape)
    while depth and len(box[depth - 1]) == shape[depth - 1]:
        depth -= 1  # all of the last dimensions: what is before them lies end to end
    inner = prod(shape[depth:])
    if not depth:
        yield range(inner)
        return
    *outer, own = box[:depth]

    def visit(place: int, begin: int) -> Iterator[range]:
        if place == len(outer):
            first = begin * shape[place] + own.start
            yield range(first * inner, (first + len(own)) * inner)
            return
        for index in outer[place]:
            yield from visit(place + 1, begin * shape[place] + index)

    yield from visit(0, 0)


LAYOUTS = ("hpczero", "gpt2")
CHUNK_NUMEL = 2**22  # read at a time
CHECKED_NUMEL = 2**18  # looked at at a time
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
INDEX_SUFFIX = ".index.json"

T = TypeVar("T")
Box = tuple[slice, ...]
Check = Callable[[int, int], None]  # (which part, of how many)

logger = logging.getLogger("hpczero.checkpoint")


@dataclass(frozen=True)
class HeldTensor:
    """One tensor in a file, as the model has it.

    Attributes:
        shape: shape of the model's parameter.
        dtype: dtype in the file.
        transposed: whether the file has it transposed.
        read: gives a box of the tensor in the file; () is all of it.
        storage: equal for tensors that are the same memory; None if that is unknown.
        label: file and key, for messages.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool
    read: Callable[[Box], Tensor]
    storage: tuple[Any, ...] | None = None
    label: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def whole(self) -> Tensor:
        """The tensor in its own dtype."""
        return self.read(()).T if self.transposed else self.read(())

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop), flat, fp32, in pieces. Raises CheckpointMismatch: fp32 cannot hold a finite value."""
        for part in self.own_pieces(start, stop):
            yield cast(part, torch.float32, self.label)

    def own_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop), flat, in their own dtype, in pieces."""
        for begin in range(start, stop, CHUNK_NUMEL):
            end = min(begin + CHUNK_NUMEL, stop)
            box, skip = smallest_box(self.shape, begin, end)
            if self.transposed:
                rows, columns = (*box, slice(None))[:2]
                part = self.read((columns, rows)).T
            else:
                part = self.read(box)
            yield part.reshape(-1)[skip : skip + end - begin]


def cast(values: Tensor, dtype: torch.dtype, label: str) -> Tensor:
    """``values`` in another dtype: rounded if both are floating, else the same numbers.

    Raises:
        CheckpointMismatch: a finite value would become infinite, or a number would change. The message has ``label``.
    """
    if values.dtype == dtype:
        return values
    plain = values.dtype.is_floating_point and dtype.is_floating_point
    if values.dtype.is_complex and not dtype.is_complex:
        raise CheckpointMismatch(f"{label} is {values.dtype}, which {dtype} cannot hold")
    found = values.to(dtype)
    if plain and torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return found
    for part, made in zip(_parts(values), _parts(found), strict=True):
        wrong = made.isinf() & part.isfinite() if plain else made.to(part.dtype) != part
        if bool(wrong.any()):
            remedy = "take a dtype of a wider range" if plain else f"keep it {values.dtype}"
            raise CheckpointMismatch(
                f"{label} holds {part[wrong].flatten()[0].item():.6g}, which {dtype} cannot; {remedy}"
            )
    return found


def _parts(values: Tensor) -> Sequence[Tensor]:
    """Views along the longest dimension, so that what a check makes of each is small beside a large tensor."""
    if values.numel() <= CHECKED_NUMEL:
        return [values]
    dim = values.shape.index(max(values.shape))
    return values.chunk(-(-values.numel() // CHECKED_NUMEL), dim)


def smallest_box(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, int]:
    """Slices of leading dimensions that hold the flat elements [start, stop), and elements in them before it."""
    box: list[slice] = []
    for dim in range(len(shape)):
        row = prod(shape[dim + 1 :])
        first, last = start // row, -(-stop // row)
        box.append(slice(first, last))
        start, stop = start - first * row, stop - first * row
        if last - first > 1:
            break
    return tuple(box), start


class WeightFiles(Mapping[str, HeldTensor]):
    """Tensors of one set of weights, by the names of the model. Files stay open and mapped while this object lives.

    Attributes:
        path: as given.
        metadata: texts that safetensors files hold beside tensors.
        model: fields of GPTConfig by a config.json beside the files, for the layout gpt2; empty if there is none.
    """

    def __init__(self, path: Path, *, layout: str = "hpczero") -> None:
        """Open the files; no values are read yet.

        Args:
            path: a file, an index, or a folder that holds one of them.
            layout: of names and shapes: ``hpczero`` for those of the model, or Hugging Face's ``gpt2``.

        Raises:
            ConfigError: there are no weights, or no such layout.
            CheckpointError: they cannot be read.
            CheckpointMismatch: they are of a GPT-2 that hpczero.models.GPT cannot compute.
        """
        if layout not in LAYOUTS:
            raise ConfigError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
        self.path = path
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, HeldTensor] = {}
        self._checks: list[Check] = []
        files, expected = files_of(path)
        held_by: dict[Path, dict[str, HeldTensor]] = {}
        for file in files:
            held_by[file], metadata, check = _open(file)
            self.metadata |= metadata
            if check is not None:
                self._checks.append(check)
        for key, held in joined(held_by, path, expected).items():
            name = gpt2.our_name(key) if layout == "gpt2" else plain_name(key)
            if name in self._tensors:
                raise CheckpointError(f"{path}: {key!r} and another key both mean {name!r}")
            if name is not None:
                turned = layout == "gpt2" and gpt2.is_transposed(name) and len(held.shape) == 2
                self._tensors[name] = (
                    replace(held, shape=held.shape[::-1], transposed=True) if turned else held
                )
        config = files[0].parent / "config.json"
        known = layout == "gpt2" and os.path.lexists(config)
        self.model: dict[str, Any] = _gpt2_model(config) if known else {}
        if len(self._checks) < len(files) and launcher_rank() == 0:
            logger.warning(
                "%s: has no digests: damage to its values cannot be seen; compare the files with those of its source",
                path,
            )

    def check(self, part: int = 0, parts: int = 1) -> None:
        """Check all values against the digests that the files state. Each of ``parts`` readers takes its share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        for check in self._checks:
            check(part, parts)

    def fingerprint(self) -> str:
        """A number that is equal for files of equal contents, from all metadata and a few values of each tensor."""
        found = hashlib.sha256(json.dumps(sorted(self.metadata.items())).encode())
        for name, held in sorted(self._tensors.items()):
            found.update(f"{name} {held.shape} {held.dtype} {held.transposed}".encode())
            own = held.shape[::-1] if held.transposed else held.shape
            for start in sorted({0, held.numel // 2, held.numel - 1}) if held.numel else ():
                box, _ = smallest_box(own, start, start + 1)
                part = held.read(box).contiguous().reshape(-1)
                found.update(part.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def __getitem__(self, name: str) -> HeldTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# --- files ---------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> tuple[list[Path], list[str]]:
    """Files that ``path`` means, and the keys that must be in them if an index says so."""
    if os.path.isdir(path):
        path = _main_file(path)
    try:
        check_regular(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; give a safetensors file, a file of torch.save, or a folder that holds one"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], []
    places = _json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: has no 'weight_map', so it is no index of weights")
    names = sorted(set(map(str, places.values())))
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise CheckpointError(f"{path}: names {foreign[0]!r}, expected files in its own folder")
    lost = [name for name in names if not os.path.isfile(path.parent / name)]
    if lost:
        raise CheckpointError(
            f"{path}: {len(lost)} of its {len(names)} files are not there, the first is {lost[0]}; bring all of them"
        )
    return [path.parent / name for name in names], list(places)


def joined(
    files: Mapping[Path, Mapping[str, T]], index: Path, expected: Sequence[str]
) -> dict[str, T]:
    """What all files of a set hold. Raises CheckpointError: two hold one key, or none an expected one."""
    found: dict[str, T] = {}
    for file, held in files.items():
        twice = sorted(held.keys() & found.keys())
        if twice:
            raise CheckpointError(
                f"{file}: has {twice[0]!r}, and so has another file; expected once"
            )
        found |= held
    lost = [key for key in expected if key not in found]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise CheckpointError(
            f"{index}: {lost[0]!r}{more} in the index and in no file; bring all files of the set"
        )
    return found


def _main_file(folder: Path) -> Path:
    """The file that a folder means: safetensors before others, an index before single files."""
    with Explained(ConfigError, f"{folder}: cannot be read: {WHY}"):
        entries = sorted(entry for entry in folder.iterdir() if entry.is_file())
    for suffix in SUFFIXES:
        for kind in (suffix + INDEX_SUFFIX, suffix):
            found = [entry for entry in entries if entry.name.endswith(kind)]
            if len(found) > 1:
                names = ", ".join(entry.name for entry in found[:3])
                raise ConfigError(f"{folder}: holds several sets of weights ({names}); name a file")
            if found:
                return found[0]
    raise ConfigError(
        f"{folder}: no weights there; expected a file that ends with {' or '.join(SUFFIXES)}, or an index of such files"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content


def _gpt2_model(config: Path) -> dict[str, Any]:
    try:
        return gpt2.our_config(_json(config))
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{config}: {error}") from error


def _open(file: Path) -> tuple[dict[str, HeldTensor], dict[str, str], Check | None]:
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_torch(file)


def _open_safetensors(file: Path) -> tuple[dict[str, HeldTensor], dict[str, str], Check | None]:
    opened = RangeFile(file)
    found = {
        key: HeldTensor(
            entry.shape, entry.dtype, False, partial(opened.box, key), label=f"{file}: {key!r}"
        )
        for key, entry in opened.entries.items()
    }
    return found, opened.metadata, None if opened.digests is None else opened.check


def _open_torch(file: Path) -> tuple[dict[str, HeldTensor], dict[str, str], Check | None]:
    opened = TorchFile(file)
    found = {}
    for key, tensor in opened.tensors.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), *tensor.stride())
        storage = (*place, *tensor.shape) if tensor.numel() else None
        found[key] = HeldTensor(
            tuple(tensor.shape),
            tensor.dtype,
            False,
            tensor.__getitem__,
            storage,
            f"{file}: {key!r}",
        )
    return found, {}, opened.check if opened.has_checksums else None


def of_gpt2(weights: WeightFiles) -> dict[str, str]:
    """The head of a GPT-2, with the token embedding it is tied to: a head of its own only if config.json says so.

    Raises:
        CheckpointMismatch: config.json ties a head that differs from the token embedding.
    """
    both = gpt2.HEAD in weights and gpt2.TABLE in weights
    tied = weights.model.get("tie_embeddings")
    if tied and both and not is_equal(weights, gpt2.HEAD, gpt2.TABLE):
        raise CheckpointMismatch(
            f"{weights.path}: config.json ties the head to the table of tokens (tie_word_embeddings, by default true), "
            f"and {gpt2.HEAD} differs from {gpt2.TABLE} in the file: some versions of transformers compute with that "
            "head, others with the table. Set tie_word_embeddings to false in config.json to keep both, or take "
            f"{gpt2.HEAD} out of the file to tie them"
        )
    if tied is None:
        tied = gpt2.HEAD not in weights or (both and is_equal(weights, gpt2.HEAD, gpt2.TABLE))
    return {gpt2.HEAD: gpt2.TABLE} if tied else {}


def of_storage(weights: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Names of tensors that share memory, each with the first of them."""
    first: dict[Any, str] = {}
    found = {}
    for name, held in weights.items():
        if held.storage is not None and first.setdefault(held.storage, name) != name:
            found[name] = first[held.storage]
    return found


def check(weights: Mapping[str, HeldTensor], aliases: Mapping[str, str], path: Path) -> None:
    """Refuse to tie names with two values, because one value would be lost.

    Args:
        weights: where the values are; a further name need not be in them.
        aliases: further names of parameters, each with the name that is kept.
        path: of the weights, for the message.

    Raises:
        CheckpointMismatch: the message names the two.
    """
    for alias, name in aliases.items():
        if alias in weights and name in weights and not is_equal(weights, alias, name):
            shapes = [weights[one].shape for one in (alias, name)]
            what = "values" if shapes[0] == shapes[1] else f"shapes, {shapes[0]} and {shapes[1]}"
            raise CheckpointMismatch(
                f"{path}: cannot tie {alias} to {name}: they have different {what} in the file, expected the "
                "same; leave out that they are tied, or take one of them out of the file"
            )


def is_equal(weights: Mapping[str, HeldTensor], name: str, other: str) -> bool:
    """Whether two tensors have one shape and the same values in fp32. Reads them, unless they are the same memory."""
    one, two = weights[name], weights[other]
    if one.shape != two.shape or is_same_memory(weights, name, other):
        return one.shape == two.shape
    pairs = zip(one.pieces(0, one.numel), two.pieces(0, two.numel), strict=True)
    return all(are_equal(first, second) for first, second in pairs)


def is_same_memory(weights: Mapping[str, HeldTensor], name: str, other: str) -> bool:
    """Whether two tensors are known to be the same memory."""
    return weights[name].storage is not None and weights[name].storage == weights[other].storage


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal; NaN equals NaN."""
    return torch.equal(one, other) or bool(
        ((one == other) | (one.isnan() & other.isnan())).all().item()
    )
