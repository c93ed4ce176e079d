"""WeightsWriter: the final weights of a run on their way into a file, tensor by tensor, in any order.

Owns: the place of each tensor, and that the file appears whole or not at all. Must not know: MPI, shards, what weights
mean. One rank writes.

The bytes are those of ``safetensors.torch.save_file``, with the metadata sorted: equal weights are equal files. The
library itself writes only what is whole in memory.

    8 bytes: size of the header | header: JSON, padded with spaces | tensors, end to end, by dtype and name
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import Self

from hpczero.checkpoint.foreign.safe_file import (
    ALIGNMENT,
    DTYPES,
    UNKNOWN,
    tensor_digest,
    with_digests,
)
from hpczero.errors import CheckpointError

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
