"""The final weights of a run: one safetensors file that states which model and tokenizer it belongs to.

Each rank writes tensors of its own, whole. Any rank reads them one at a time, so no reader needs memory for more than
one parameter.
Sharded checkpoints with optimizer state are read by ``run/sampling.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpczero.checkpoint.foreign.safe_file import WeightsWriter
from hpczero.checkpoint.foreign.weight_files import RangeFile
from hpczero.data.tokenize import Tokenizer, from_json
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, launcher_rank
from hpczero.files.regular import parse_json, shown
from hpczero.job.team import Team
from hpczero.models import GPTConfig

logger = logging.getLogger("hpczero.weights")

WEIGHTS_FILE = "model.safetensors"  # in the folder of a run

_KEY = "hpczero"
# What a damaged file may raise.
DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, MemoryError)


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, model: GPTConfig, tokenizer: Tokenizer, step: int
) -> None:
    """Write a weights file, which appears whole or not at all. Not collective: rank 0 calls it.

    A file at ``path`` is replaced. A tied parameter, one tensor under several names, is written under the first.

    Raises:
        CheckpointError: the file cannot be written.
    """
    card = dataclasses.asdict(model)
    told = tokenizer.to_json()
    with begin_weights(path, tensors, card=card, tokenizer=told, step=step) as writer:
        writer.put((tensor, tensor) for tensor in {id(t): t for t in tensors.values()}.values())
        writer.commit()


def begin_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    card: Mapping[str, Any],
    tokenizer: str | None,
    step: int,
    team: Team | None = None,
) -> WeightsWriter:
    """The file of ``write_weights``, written by the ranks of ``team``. Not collective; ``tensors`` need no values.

    ``card`` is what the file states of the model, of a GPT its sizes. ``tokenizer`` is JSON; None for a model that
    reads no tokens.
    """
    text = {} if tokenizer is None else {"tokenizer": tokenizer}
    return WeightsWriter(
        path, tensors, {_KEY: json.dumps({"model": dict(card), **text, "step": step})}, team
    )


def step_of_weights(path: Path) -> int | None:
    """Step of the weights file ``path``; None if it cannot be read."""
    try:
        return int(parse_json(RangeFile(path).metadata[_KEY])["step"])
    except (CheckpointError, *DAMAGE):
        return None


def check_writes_text(path: Path, card: object) -> None:
    """Refuse weights of a model of ``model.factory`` by their ``card``: hpczero.sample cannot write text from them.

    Raises:
        CheckpointMismatch: they are.
    """
    if isinstance(card, Mapping) and "factory" in card:
        raise CheckpointMismatch(
            f"{path}: weights of a model of --model.factory {shown(card['factory'])}, and text can be sampled from "
            "presets alone; build the model in your own program, and load them with hpczero.checkpoint.load, or with "
            "safetensors.torch.load_file"
        )


class Weights:
    """A weights file open for reading, tensor by tensor. Not collective: each rank opens its own.

    Attributes:
        path: path of the file.
        model: sizes of the GPT.
        tokenizer: text to tokens and back.
        step: optimizer steps done.
        fingerprint: differs for other weights, as far as that is known without reading them.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path``, a weights file or the folder of a run.

        Raises:
            ConfigError: there is no such file.
            CheckpointError: it is damaged, or not one of ours.
            CheckpointMismatch: it is of a model of a factory.
        """
        self.path = path / WEIGHTS_FILE if os.path.isdir(path) else path
        if not os.path.exists(self.path):
            raise ConfigError(
                f"{self.path}: no such weights; give a run folder whose training has ended, or a safetensors file"
            )
        self._file = RangeFile(self.path)
        metadata, tensors = self._file.metadata, self._file.entries
        try:
            card = parse_json(metadata[_KEY])
            check_writes_text(self.path, card["model"])
            self.fingerprint = hashlib.sha256(repr(sorted(metadata.items())).encode()).hexdigest()
            self.model = GPTConfig(**card["model"])
            self.tokenizer = from_json(card["tokenizer"])
            self.step = int(card["step"])
            if self.model.layers > len(tensors):
                raise ValueError(f"{self.model.layers} layers in {len(tensors)} tensors")
        except CheckpointMismatch:
            raise
        except DAMAGE as error:
            raise CheckpointError(
                f"{self.path}: not weights of hpczero.train, or damaged: {error}"
            ) from error
        if self._file.digests is None and launcher_rank() == 0:
            logger.warning(
                "%s: written by an earlier version, without digests: damage to it cannot be seen; export the "
                "checkpoint it belongs to if there is one",
                self.path,
            )

    def check(self, part: int, parts: int) -> None:
        """Check one of ``parts`` parts of the values against their digests, if any. Raises CheckpointError."""
        self._file.check(part, parts)

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        del self._file

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, checked; for ``zeroify(initialize=...)``. Raises CheckpointError."""
        if name not in self._file.entries:
            raise CheckpointError(f"{self.path}: parameter {name!r} cannot be read: is not there")
        found = self._file.checked(name)
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{self.path}: parameter {name!r} is {tuple(found.shape)}, expected {tuple(tensor.shape)}"
            )
        tensor.copy_(found)
