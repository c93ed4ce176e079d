"""FolderWriter: a Hugging Face folder on its way to the disk, tensor by tensor, which appears whole or not at all.

Owns: the division into files, the index, the hidden name and the rename. Must not know: MPI, shards, models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch import Tensor
from typing_extensions import Self

from hpczero.checkpoint.foreign.safe_file import write_json
from hpczero.checkpoint.foreign.weights_writer import WeightsWriter
from hpczero.errors import CheckpointNotWritten, ConfigError
from hpczero.files.durable import Hidden, is_free
from hpczero.files.regular import reason
from hpczero.hf.files import INDEX, SINGLE


class FolderWriter:
    """One folder; a context manager, which leaves nothing of a folder that was not committed. One rank writes."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], shard_nbytes: int) -> None:
        """Nothing is written before the block begins.

        Args:
            folder: must not exist, or be empty.
            tensors: shapes and dtypes by key; values do not matter.
            shard_nbytes: most bytes of a file; a larger tensor has a file of its own.

        Raises:
            ConfigError: something is at ``folder``.
        """
        self._folder = folder.absolute()
        try:
            if not is_free(self._folder):
                raise ConfigError(f"{folder}: is there already; give another name, or take it away")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be looked at: {reason(error)}") from error
        self._hidden = Hidden(self._folder)
        self._tensors = dict(tensors)
        self._parts = _divided(self._tensors, shard_nbytes)
        self._stack = ExitStack()
        self._homes: dict[str, WeightsWriter] = {}
        self._writers: list[WeightsWriter] = []

    def put(self, key: str, values: Tensor) -> None:
        """Write one tensor, of the shape and dtype that were said.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._homes[key].put([(self._tensors[key], values)])

    def commit(self, beside: Callable[[Path], None]) -> None:
        """All tensors are there: the folder takes its name once everything is on the disk.

        Args:
            beside: writes what lies beside the weights into the folder that it is given.

        Raises:
            CheckpointError: it cannot be written.
        """
        for writer in self._writers:
            writer.commit()
        try:
            beside(self._hidden.path)
            if len(self._parts) > 1:
                self._write_index()
            self._hidden.commit()
        except OSError as error:
            raise self._not_written(error) from error

    def __enter__(self) -> Self:
        """Begin the files.

        Raises:
            CheckpointError: they cannot be written.
        """
        try:
            self._stack.enter_context(self._hidden).path.mkdir()
            for name, part in self._parts.items():
                tensors = {key: self._tensors[key] for key in part}
                writer = WeightsWriter(self._hidden.path / name, tensors, {"format": "pt"})
                self._stack.enter_context(writer)
                self._writers.append(writer)
                self._homes |= dict.fromkeys(part, writer)
        except BaseException as error:
            self._stack.close()
            if isinstance(error, OSError):
                raise self._not_written(error) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _not_written(self, error: OSError) -> CheckpointNotWritten:
        return CheckpointNotWritten(
            f"{self._folder}: cannot be written ({os.strerror(error.errno or 0)}); check path, space and permissions"
        )

    def _write_index(self) -> None:
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        places = {key: name for name, part in self._parts.items() for key in part}
        content = {
            "metadata": {"total_size": total},
            "weight_map": {key: places[key] for key in self._tensors},
        }
        write_json(self._hidden.path / INDEX, content)


def _divided(tensors: Mapping[str, Tensor], most: int) -> dict[str, list[str]]:
    """Keys by file, in order."""
    parts: list[list[str]] = [[]]
    room = most
    for key, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = most
        parts[-1].append(key)
        room -= tensor.nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    count = len(parts)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": part for n, part in enumerate(parts, 1)}
