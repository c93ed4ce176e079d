"""The weights in a checkpoint of the training command, tensor by tensor, each checked against its digests.

Owns: what makes a checkpoint one that text can be sampled from: the model's sizes and its tokenizer. Must not know:
MPI, which checkpoint is wanted, optimizer state. Any number of ranks read, each for itself, with one slab in memory.

A checkpoint states its tokenizer, so it may be set aside, copied or loaded by another run, and its tokens are never
read with another tokenizer. A checkpoint of an earlier version does not. The token file must then be named, and is
compared with what the checkpoint says of the run's data.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from torch import Tensor

from hpczero.checkpoint.disk.folder import misnamed
from hpczero.checkpoint.disk.format import MASTER
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.disk.stored import Stored
from hpczero.data import Tokenizer, same_tokenizer, tokenizer_name
from hpczero.data.tokenize import from_json
from hpczero.data.tokens import TokenFile
from hpczero.errors import (
    CheckpointMismatch,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    launcher_rank,
)
from hpczero.files.regular import shown
from hpczero.models import GPTConfig
from hpczero.models.config import parameter_shapes
from hpczero.run.results.weights import check_writes_text
from hpczero.run.starting.resume import DATA, MODEL, TOKENIZER, data_of

logger = logging.getLogger("hpczero.weights")


class CheckpointWeights:
    """One checkpoint as a ``WeightSource``. Once it is open, it stays readable even if the checkpoint is deleted."""

    def __init__(self, path: Path, *, asked_for: bool, token_file: Path | None = None) -> None:
        """Open a checkpoint; no values are read yet.

        Args:
            path: folder of the checkpoint.
            asked_for: whether it was asked for by its path. It need then not be of the step that its name states.
            token_file: the token file that the run was trained on.

        Raises:
            CorruptCheckpoint: its manifest or size is not what was written, or its name states another step.
            CheckpointMismatch: it is not of a GPT of hpczero.train, or a later version wrote it.
            ConfigError: its tokenizer is not known, or ``token_file`` is of another one.
            DataError: ``token_file`` cannot be read.
        """
        self.path = path
        self._stored = Stored(path)
        try:
            manifest = self._stored.manifest
            wrong = misnamed(path, manifest)
            if wrong and not asked_for:
                raise CorruptCheckpoint(wrong)
            self.step = manifest.step
            self.fingerprint = hashlib.sha256(manifest.to_json().encode()).hexdigest()
            self._extra = extra_of(manifest.meta)
            self.model = self._model()
            self._rows = manifest.table.named()
            self._check_shapes()
            self.tokenizer = self._tokenizer(token_file)
        except BaseException:
            self._stored.close()
            raise

    def _model(self) -> GPTConfig:
        said = self._extra.get(MODEL)
        check_writes_text(self.path, said)
        if not isinstance(said, dict):
            raise CheckpointMismatch(
                f"{self.path}: does not say which GPT it is of: it was not saved by hpczero.train, and cannot be "
                "sampled from; `python -m hpczero.checkpoint export` gives its weights"
            )
        try:
            return GPTConfig(**said)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointMismatch(
                f"{self.path}: says that its model is {shown(said)}, which is no GPT of this version ({error})"
            ) from error

    def _check_shapes(self) -> None:
        owners = self._stored.manifest.table.owners
        try:
            if self.model.layers > len(owners):
                raise ValueError(f"{self.model.layers} layers in {len(owners)} parameters")
            expected = sorted(parameter_shapes(self.model))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointMismatch(f"{self.path}: sizes that are no GPT's: {error}") from error
        found = sorted((row.name, row.shape) for row in owners)
        if found == expected:
            return
        names = sorted({name for name, _ in set(found) ^ set(expected)})
        raise CheckpointMismatch(
            f"{self.path}: its parameters are not those of the GPT that it says it is of: {', '.join(names[:5])}"
            f"{f' and {len(names) - 5} more' if names[5:] else ''} are missing, foreign or of another shape"
        )

    def _tokenizer(self, token_file: Path | None) -> Tokenizer:
        said = self._extra.get(TOKENIZER)
        if said is None:
            found = self._from(token_file)
        elif isinstance(said, str):
            try:
                found = from_json(said)
            except DataError as error:
                raise CheckpointMismatch(f"{self.path}: {error}; upgrade hpczero") from error
            if token_file is not None:
                check_token_file(self.path, said, token_file)
        else:
            raise CheckpointMismatch(f"{self.path}: its tokenizer is {shown(said)}, expected text")
        if found.vocab_size != self.model.vocab_size:
            raise CheckpointMismatch(
                f"{self.path}: its tokenizer has {found.vocab_size:,} ids and its model {self.model.vocab_size:,}; "
                "they do not belong together"
            )
        return found

    def _from(self, token_file: Path | None) -> Tokenizer:
        """The tokenizer of ``token_file``. Raises ConfigError if the checkpoint was not trained on that file."""
        if token_file is None:
            raise ConfigError(
                f"{self.path}: has no tokenizer in it, as those of earlier versions and of other programs' weights; "
                "name the token file (.h5) that it was trained on with --token-file FILE (a run's config.toml says in "
                "[data] which that is)"
            )
        with TokenFile.open(token_file) as tokens:
            now, tokenizer = data_of(tokens), tokens.tokenizer
        trained_on = self._extra.get(DATA)
        if trained_on is None:
            if launcher_rank() == 0:
                logger.warning(
                    "%s: says neither its tokenizer nor its data, so nobody can tell whether that of %s is the right "
                    "one: that it has as many ids is all that is checked",
                    self.path,
                    token_file,
                )
        elif trained_on != now:
            raise ConfigError(
                f"{token_file}: is not what {self.path} was trained on: that was {shown(trained_on)}, and this is "
                f"{now}; its tokens would be read with a wrong tokenizer"
            )
        return tokenizer

    def check(self, part: int, parts: int) -> None:
        """Check one of ``parts`` parts of the values against their digests."""
        dataset = self._stored.manifest.dataset(MASTER)
        assert dataset is not None, "the content was checked"
        for index in dataset.slabs_of(part, parts):
            slab = dataset.slab(index)
            for _ in self._stored.read(MASTER, slab.start, slab.stop):
                pass

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, checked."""
        row = self._rows.get(name)
        if row is None or row.shape != tuple(tensor.shape):
            found = "not in it" if row is None else str(row.shape)
            raise CheckpointMismatch(
                f"{self.path}: parameter {name!r} is {found}, expected {tuple(tensor.shape)}"
            )
        flat, begin = tensor.view(-1), 0
        for piece in self._stored.read(MASTER, row.offset, row.offset + row.numel):
            flat[begin : begin + len(piece)].copy_(torch.from_numpy(piece))
            begin += len(piece)

    def close(self) -> None:
        """Close the checkpoint; nothing can be read any more."""
        self._stored.close()


def check_token_file(path: Path, tokenizer: str, token_file: Path) -> None:
    """Refuse a token file whose tokenizer is not that of the weights at ``path``.

    Raises:
        ConfigError: the message names both.
        DataError: the file cannot be read.
    """
    with TokenFile.open(token_file) as tokens:
        other = tokens.tokenizer.to_json()
    if not same_tokenizer(tokenizer, other):
        raise ConfigError(
            f"{token_file}: has another tokenizer ({tokenizer_name(other)}) than {path} ({tokenizer_name(tokenizer)}), "
            "which says its own; leave --token-file out"
        )
