"""The final weights of a run: one safetensors file that says by itself which model and tokenizer it belongs to.

Owns: the file. Must not know: MPI, shards; one rank writes whole tensors, any rank reads them one at a time, so that no
reader needs memory for more than one parameter. (Sharded checkpoints, with optimizer state, are another thing.)
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpczero.data.tokenize import Tokenizer, from_json
from hpczero.errors import CheckpointError, ConfigError
from hpczero.models import GPTConfig

_KEY = "hpczero"


def write_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    model: GPTConfig,
    tokenizer: Tokenizer,
    step: int,
) -> None:
    """Write a weights file, which appears whole or not at all. On one rank only.

    Args:
        path: replaced if it exists.
        tensors: fp32; a tied parameter, the same tensor under several names, is written under the first.
        model: what the tensors are the parameters of.
        tokenizer: what its tokens mean.
        step: optimizer steps done.

    Raises:
        CheckpointError: the file cannot be written.
    """
    once = {id(tensors[name]): (name, tensors[name]) for name in reversed(list(tensors))}
    card = {"model": dataclasses.asdict(model), "tokenizer": tokenizer.to_json(), "step": step}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(dict(once.values()), temporary, metadata={_KEY: json.dumps(card)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the contents do
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the weights cannot be written ({error}); check space and permissions"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: Path) -> Any:  # Any: the library ships no types
    return safe_open(path, framework="pt", device="cpu")


class Weights:
    """A weights file open for reading, tensor by tensor. Not collective: each rank opens its own.

    Attributes:
        model: sizes of the GPT.
        tokenizer: text to tokens and back.
        step: optimizer steps done.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path``, a weights file or the folder of a run.

        Raises:
            ConfigError: there is no such file.
            CheckpointError: it is damaged, or not one of ours.
        """
        self.path = path / "model.safetensors" if path.is_dir() else path
        if not self.path.is_file():
            raise ConfigError(
                f"{self.path}: no such weights; give a run folder whose training has ended, or a safetensors file"
            )
        try:
            self._file: Any = _open(self.path)
            card = json.loads((self._file.metadata() or {})[_KEY])
            self.model = GPTConfig(**card["model"])
            self.tokenizer = from_json(card["tokenizer"])
            self.step = int(card["step"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: not weights of hpczero.train, or damaged: {error}"
            ) from error

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place; what ``zeroify(initialize=...)`` calls.

        Raises:
            CheckpointError: the parameter is not there or has another shape.
        """
        try:
            found = self._file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.path}: parameter {name!r} cannot be read: {error}"
            ) from error
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{self.path}: parameter {name!r} is {tuple(found.shape)}, expected {tuple(tensor.shape)}"
            )
        tensor.copy_(found)
