"""Safetensors files written tensor by tensor.

Owns: the header, the order of tensors in a file, the division into several files. Must not know: checkpoints, torch.
The safetensors library cannot be used: it writes only what is whole in memory.

    8 bytes: size of the header | header: JSON, padded with spaces | tensors, end to end
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from hpczero.errors import CheckpointError
from hpczero.files.regular import parse_json

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS_KEY = "hpczero.digests"
HAS = "hpczero.has-digests"  # a second entry, or damage to the name of the first would leave a file without digests
UNKNOWN = "0" * 16  # as long as any other

Array = npt.NDArray[Any]


def tensor_digest(dtype: str, shape: Iterable[int], pieces: Iterable[Array]) -> str:
    """Digest of one tensor, 16 hexadecimal digits.

    Args:
        dtype: name of the dtype in the file, such as ``F32``.
        shape: shape in the file.
        pieces: its bytes from first to last, contiguous.
    """
    state = xxhash.xxh3_64(f"{dtype} {list(shape)} ".encode())
    for piece in pieces:
        state.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


def with_digests(metadata: Mapping[str, str], tensors: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` with the entries for the digests; ``tensors`` has the digest of each tensor."""
    entry = {"metadata": _of_texts(metadata), "tensors": dict(tensors)}
    return {**metadata, HAS: "true", DIGESTS_KEY: json.dumps(entry, separators=(",", ":"))}


@dataclass(frozen=True)
class Digests:
    """What a file states that its tensors are.

    Attributes:
        tensors: digest of each.
    """

    tensors: dict[str, str]

    @classmethod
    def of(cls, metadata: Mapping[str, str], names: Iterable[str]) -> Digests | None:
        """Digests of a file with these ``metadata`` and tensors; None if it has none.

        Raises:
            ValueError: the metadata are not what was written, or the file has other tensors.
        """
        if DIGESTS_KEY not in metadata and HAS not in metadata:
            return None
        if DIGESTS_KEY not in metadata or metadata.get(HAS) != "true":
            raise ValueError("its digests are lost")
        entry = parse_json(metadata[DIGESTS_KEY])
        fields = entry if isinstance(entry, dict) else {}
        others = {name: text for name, text in metadata.items() if name not in (DIGESTS_KEY, HAS)}
        if fields.get("metadata") != _of_texts(others):
            raise ValueError("what it says beside its tensors does not have the digest it states")
        tensors = fields.get("tensors")
        if not isinstance(tensors, dict) or tensors.keys() != set(names):
            raise ValueError("its tensors are not those it has digests of")
        return cls(tensors)

    def check(self, name: str, found: str) -> None:
        """Compare the digest of a tensor with the one that the file states.

        Raises:
            ValueError: they differ.
        """
        if self.tensors[name] != found:
            raise ValueError(f"{name!r} does not have the digest it was written with")


def _of_texts(metadata: Mapping[str, str]) -> str:
    text = json.dumps(sorted(metadata.items()))
    return str(xxhash.xxh3_64(text.encode()).hexdigest())


INDEX_FILE = "model.safetensors.index.json"
KEY = "hpczero.checkpoint"  # of what our own files say about their tensors
ALIGNMENT = 8

# dtype of torch: its name in the file, bytes of an element
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: its key in the file.
        dtype: torch's name of the dtype, a key of ``DTYPES``.
        shape: shape in the file.
        pieces: gives its bytes from first to last as contiguous arrays. Each is valid until the next one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.dtype][1]


def split(entries: Sequence[TensorEntry], shard_nbytes: int) -> list[list[TensorEntry]]:
    """Divide entries into files of at most ``shard_nbytes``, in order. A larger tensor has a file of its own."""
    files: list[list[TensorEntry]] = [[]]
    room = shard_nbytes
    for entry in entries:
        if files[-1] and entry.nbytes > room:
            files.append([])
            room = shard_nbytes
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def write_all(
    folder: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str], shard_nbytes: int
) -> None:
    """Write ``model-00001-of-0000N.safetensors`` and so on, then the index that says which file has which tensor.

    Raises:
        OSError: they cannot be written.
    """
    files = split(entries, shard_nbytes)
    places = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write(folder / name, part, metadata)
        places.update({entry.name: name for entry in part})
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: places[entry.name] for entry in entries},
    }
    write_json(folder / INDEX_FILE, index)


def write(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> None:
    """Write one file; it is on the disk on return.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first, so that each tensor lies on a multiple of its element.
    ordered = sorted(entries, key=lambda entry: -DTYPES[entry.dtype][1])
    digests = {entry.name: UNKNOWN for entry in ordered}
    with path.open("xb") as file:
        file.write(_header(ordered, with_digests(metadata, digests)))
        for entry in ordered:
            written = _Counted(entry, file)
            code = DTYPES[entry.dtype][0]
            digests[entry.name] = tensor_digest(code, entry.shape, written.pieces())
            assert written.nbytes == entry.nbytes, f"{entry.name}: {written.nbytes} bytes"
        file.seek(0)
        file.write(_header(ordered, with_digests(metadata, digests)))  # of the same size
        file.flush()
        os.fsync(file.fileno())


class _Counted:
    """The pieces of an entry on their way into a file."""

    def __init__(self, entry: TensorEntry, file: BinaryIO) -> None:
        self._entry = entry
        self._file = file
        self.nbytes = 0

    def pieces(self) -> Iterator[Array]:
        """Each piece, once it is written."""
        for piece in self._entry.pieces():
            flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            self._file.write(flat.data)
            self.nbytes += flat.nbytes
            yield flat


def _header(ordered: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for entry in ordered:
        end = begin + entry.nbytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype][0],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one small file; it is on the disk on return.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


# WeightsWriter: the final weights of a run on their way into a file, tensor by tensor, in any order.
#
# The bytes are those of ``safetensors.torch.save_file``, with the metadata sorted: equal weights are equal files. The
# library itself writes only what is whole in memory.
#
#     8 bytes: size of the header | header: JSON, padded with spaces | tensors, end to end, by dtype and name

# In the order of the library's own list, which it sorts by, last ones first; then by name.
# safetensors 0.8, safetensors/src/tensor.rs: enum Dtype, fn prepare
_RANKS = (
    *(
        "bool",
        "uint8",
        "int8",
        "float8_e5m2",
        "float8_e4m3fn",
        "int16",
        "uint16",
        "float16",
        "bfloat16",
    ),
    *("int32", "uint32", "float32", "float64", "int64", "uint64"),
)


class WeightsWriter:
    """One file; a context manager, which leaves nothing of a file that was not committed. Not collective."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        """Nothing is written before the block begins.

        Args:
            path: replaced if it exists.
            tensors: shapes and dtypes by name, in the order of the model; values do not matter. The same tensor under
                several names is written under the first.
            metadata: what the file says beside its tensors.
        """
        once = {id(tensors[name]): name for name in reversed(list(tensors))}
        self._names = once
        self._tensors = {name: tensors[name] for name in once.values()}  # ids stay theirs
        self._digests = dict.fromkeys(once.values(), UNKNOWN)
        self._metadata = metadata
        self._places: dict[str, int] = {}
        end = 0
        for name in sorted(sorted(self._tensors), key=lambda name: -_rank(self._tensors[name])):
            self._places[name] = end
            end += _nbytes(self._tensors[name])
        self._nbytes = end
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file: BinaryIO | None = None
        self._begin = 0  # of the tensors in the file

    def put(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write some tensors.

        Args:
            pairs: one of those that the file was begun with, the very object; values of the same shape and dtype.

        Raises:
            CheckpointError: they cannot be written.
        """
        for tensor, values in pairs:
            self._put(tensor, values)

    def _put(self, tensor: Tensor, values: Tensor) -> None:
        import torch  # here: the checkpoint command writes files without it

        assert self._file is not None, "begun"
        name = self._names[id(tensor)]
        assert (values.dtype, values.shape) == (tensor.dtype, tensor.shape), name
        flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._digests[name] = tensor_digest(_code(tensor), tensor.shape, [flat])
        with _told(self._path):
            self._file.seek(self._begin + self._places[name])
            self._file.write(flat.data)

    def commit(self) -> None:
        """All tensors are there: the file takes its name, once it is on the disk.

        Raises:
            CheckpointError: it cannot be written.
        """
        assert self._file is not None, "begun"
        missing = [name for name, digest in self._digests.items() if digest == UNKNOWN]
        assert not missing, f"never put: {missing}"
        with _told(self._path):
            self._file.seek(0)
            self._file.write(self._header())
            self._file.flush()
            os.fsync(self._file.fileno())  # a rename may reach the disk before the contents do
            self._file.close()
            self._temporary.replace(self._path)

    def __enter__(self) -> Self:
        """Begin the file.

        Raises:
            CheckpointError: it cannot be written.
        """
        header = self._header()  # of the same size as the last one
        self._begin = len(header)
        try:
            with _told(self._path):
                self._file = self._temporary.open("wb")
                self._file.write(header)
                self._file.truncate(self._begin + self._nbytes)  # an empty tensor may be the last
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def _clear(self) -> None:
        with suppress(OSError):  # of what could not be written: told before
            if self._file is not None:
                self._file.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _header(self) -> bytes:
        header: dict[str, Any] = {
            "__metadata__": dict(sorted(with_digests(self._metadata, self._digests).items()))
        }
        for name, begin in self._places.items():
            tensor = self._tensors[name]
            header[name] = {
                "dtype": _code(tensor),
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + _nbytes(tensor)],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of the system become a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: the weights cannot be written ({error}); check space and permissions"
        ) from error


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _code(tensor: Tensor) -> str:
    return DTYPES[_dtype(tensor)][0]


def _rank(tensor: Tensor) -> int:
    return _RANKS.index(_dtype(tensor))


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * DTYPES[_dtype(tensor)][1]
