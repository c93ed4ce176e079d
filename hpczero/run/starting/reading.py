"""What a run reads: the token file of a text, or the samples that its adapter brings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from typing_extensions import override

from hpczero.adapters.base import Adapter
from hpczero.data import HeldOut, TokenFile
from hpczero.data.batches import Int64Array, Sampler, StepBatches, at_even_distances, in_rounds
from hpczero.data.prepare import token_file
from hpczero.data.sources import Sources, names_sources
from hpczero.errors import ConfigError, DataError
from hpczero.job import log
from hpczero.job.root_work import done_by_root
from hpczero.job.signals import Signals
from hpczero.job.topology import Topology
from hpczero.options.config import DataOptions, RunConfig
from hpczero.run.results.progress import PhaseProgress, Style
from hpczero.run.starting.building import an_adapter
from hpczero.run.starting.resume import DATA, TOKENIZER, data_of


def open_tokens(
    options: DataOptions,
    topology: Topology,
    *,
    progress: Style = "lines",
    signals: Signals | None = None,
) -> TokenFile | Sources:
    """Open what a run reads. Text is tokenized first if necessary: rank 0 does that, every rank opens it. Collective.

    A signal that asks to stop, on any rank, ends the tokenizing.

    Raises:
        DataError: text or file is missing, empty or malformed, or not the same on all ranks; on every rank.
        StoppedEarly: a rank was asked to stop while the file was made; on every rank.
    """
    tokens: TokenFile | Sources
    if names_sources(options.path):
        path = str(options.path)
        with topology.agreed("open the sources of tokens"):
            tokens = Sources.open(Path(path))
    else:
        # Of a large text it takes longer than any collective may.
        style = progress if topology.is_root else "lines"
        with PhaseProgress(style, lambda line: log.info("%s", line)) as shown:
            path = done_by_root(
                topology,
                "prepare the token file",
                lambda said: str(token_file(options, said)),
                show=shown.show,
                is_stopped=lambda: signals is not None and signals.came,
            )
        with topology.agreed("open the token file"):
            tokens = TokenFile.open(Path(path))
    # Of one path: nodes may have folders of their own there.
    unlike = DataError(f"{path}: another file; bring the same one to every node")
    topology.same(tokens.fingerprint, "compare the token file with that of rank 0", unlike)
    return tokens


LOOKED_AT = 1024  # rows of a set that its digest is made of


class Rows:
    """A data set as rows by number; a row is a tuple of tensors. Not collective.

    Args:
        given: a tuple of tensors of equal first dimension, or an object with ``__len__`` and ``__getitem__(index)``.
        what: names it in messages.

    Raises:
        DataError: it is neither, or is empty.
    """

    def __init__(self, given: Any, what: str) -> None:
        tensors = getattr(given, "tensors", given)  # of a TensorDataset
        self._tensors: tuple[Tensor, ...] | None = None
        self._items, self._what = given, what
        if isinstance(tensors, (tuple, list)) and all(isinstance(t, Tensor) for t in tensors):
            self._tensors = tuple(t.detach() for t in tensors)
            sizes = [t.shape[0] if t.dim() else 0 for t in tensors]
            if len({*sizes}) != 1:
                raise DataError(
                    f"{what}: got tensors of {sizes} rows, expected one number of rows in all of them"
                )
            self._size = sizes[0]
        elif isinstance(given, tuple) and any(isinstance(part, np.ndarray) for part in given):
            raise DataError(
                f"{what}: got a tuple with arrays of NumPy, expected one of tensors: torch.from_numpy(...)"
            )
        elif hasattr(given, "__len__") and hasattr(given, "__getitem__"):
            self._size = len(given)
        else:
            raise DataError(
                f"{what}: got {type(given).__name__}, expected a tuple of tensors, or an object with __len__ and "
                "__getitem__(index); an iterator cannot go on where another job stopped"
            )
        if self._size < 1:
            raise DataError(f"{what}: has no samples")

    def __len__(self) -> int:
        return self._size

    def take(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        """The rows with these numbers, stacked; tensors of the host."""
        if self._tensors is not None:
            chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
            return tuple(tensor[chosen] for tensor in self._tensors)
        items = [self._items[int(index)] for index in indices]
        try:
            batch = default_collate(items)
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{self._what}: samples {', '.join(str(int(index)) for index in indices[:3])} ... cannot be stacked "
                f"({str(error).splitlines()[0]}), expected tensors of one shape, numbers, or tuples of them"
            ) from error
        found = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if not all(isinstance(tensor, Tensor) for tensor in found):
            raise DataError(
                f"{self._what}: a sample is {type(items[0]).__name__} of "
                f"{', '.join(type(tensor).__name__ for tensor in found)}, expected tensors, numbers or a tuple"
            )
        return found

    def digest(self) -> str:
        """Equal for equal sets: number of rows, and the bytes of at most ``LOOKED_AT`` rows at even distances."""
        digest = hashlib.sha256(f"{self._size}".encode())
        for tensor in self.take(at_even_distances(self._size, LOOKED_AT)):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class OwnBatches(StepBatches[tuple[Tensor, ...]]):
    """Training batches of rows, as ``data.Batches`` of tokens."""

    rows: Rows
    global_batch: int
    seed: int

    @override
    def at(self, places: Int64Array) -> tuple[Tensor, ...]:
        return self.rows.take(Sampler(len(self.rows), self.seed).samples(places))


@dataclass(frozen=True)
class OwnPart:
    """One rank's share of an evaluation round, as ``data.EvaluationBatch``."""

    arrays: tuple[Tensor, ...]
    num_samples: int


class OwnHeldOut:
    """A fixed set of held-out rows, as ``data.HeldOut`` of tokens."""

    def __init__(self, rows: Rows, max_samples: int) -> None:
        self._rows, self._numbers = rows, at_even_distances(len(rows), max_samples)

    def __len__(self) -> int:
        return len(self._numbers)

    def batches(self, *, micro_batch: int, rank: int, world_size: int) -> Iterator[OwnPart]:
        """This rank's batches; every rank gets the same number."""
        for mine, num_samples in in_rounds(self._numbers, micro_batch, rank, world_size):
            yield OwnPart(self._rows.take(mine), num_samples)


@dataclass(frozen=True)
class TextReading:
    """Tokens of a text, or of several sources."""

    tokens: TokenFile | Sources

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint states of the data: their digest, and the tokenizer."""
        return {DATA: data_of(self.tokens), TOKENIZER: self.tokens.tokenizer.to_json()}

    def describe(self) -> str:
        """Which file it is, and how many tokens it has, for the run header."""
        tokens = self.tokens
        return (
            f"data: {tokens.path}: {len(tokens.train):,} training and {len(tokens.validation):,} held-out "
            f"tokens, vocabulary of {tokens.vocab_size:,}{tokens.describe_shares()}"
        )

    def training(
        self, config: RunConfig, context: int, global_batch: int
    ) -> StepBatches[tuple[Int64Array, Int64Array]]:
        """Windows of ``context`` tokens."""
        return self.tokens.batches(context, global_batch, config.run.seed)

    def held_out(self, context: int, max_samples: int) -> HeldOut:
        """Windows of the held-out split."""
        return self.tokens.held_out(context, max_samples)

    def loss_in_words(self, held_out_loss: float) -> str:
        """Per token and, where the text is known, per byte of it, which other tokenizers can be compared by."""
        density = self.tokens.validation.bytes_per_token
        per_byte = f", {held_out_loss / density:.4f} nats per byte of text" if density else ""
        return f"{held_out_loss:.4f} nats per token{per_byte}"

    def close(self) -> None:
        """Close the token file."""
        self.tokens.close()


@dataclass(frozen=True)
class OwnReading:
    """Samples of an adapter."""

    name: str
    rows: Rows
    held_out_rows: Rows | None
    digest: str

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint states of the data: the digest of both sets."""
        return {DATA: self.digest}

    def describe(self) -> str:
        """Whose samples, and how many, for the run header."""
        held_out = 0 if self.held_out_rows is None else len(self.held_out_rows)
        return (
            f"data: of {self.name}: {len(self.rows):,} training and {held_out:,} held-out samples"
        )

    def training(self, config: RunConfig, context: int, global_batch: int) -> OwnBatches:
        """Rows of the training set."""
        return OwnBatches(self.rows, global_batch, config.run.seed)

    def held_out(self, context: int, max_samples: int) -> OwnHeldOut | None:
        """Rows of the held-out set."""
        return None if self.held_out_rows is None else OwnHeldOut(self.held_out_rows, max_samples)

    def loss_in_words(self, held_out_loss: float) -> str:
        """As the adapter measures it."""
        return f"{held_out_loss:.4f}"

    def close(self) -> None:
        """Nothing is open."""


HeldOutSet = HeldOut | OwnHeldOut
RunData = TextReading | OwnReading


def open_reading(
    config: RunConfig, adapter: Adapter, topology: Topology, *, signals: Signals
) -> tuple[RunData, Adapter]:
    """The data of a run, and the adapter with the vocabulary of the tokenizer. Collective over world.

    Raises:
        DataError: data are missing or malformed, or differ between ranks; on every rank.
        ConfigError: options are about a text, and the model reads none; on every rank.
        StoppedEarly: as of ``open_tokens``.
    """
    name = type(adapter).__name__
    if adapter.reads_text:
        style = config.log.progress
        tokens = open_tokens(config.data, topology, progress=style, signals=signals)
        with topology.agreed("give the model its vocabulary"):
            sized = adapter.with_vocabulary(tokens.vocab_size)
            adapter = an_adapter(sized, f"{name}.with_vocabulary()")
            if config.data.documents == "separate":
                check_separate(config)
                apart = adapter.with_separator(tokens.tokenizer.separator)
                adapter = an_adapter(apart, f"{name}.with_separator()")
            return TextReading(tokens), adapter
    with topology.agreed("open the samples of the adapter"):
        _check_no_text(config, name)
        training, held_out = _both(adapter.samples(), name)
        rows = Rows(training, f"training set of {name}")
        others = None if held_out is None else Rows(held_out, f"held-out set of {name}")
        digest = f"{rows.digest()} {others.digest() if others else 'none'}"
    unlike = DataError(
        f"{name}.samples() gave other samples than on rank 0; make them from a generator with a seed of its own, or "
        "bring the same files to every node"
    )
    topology.same(digest, "compare the samples with those of rank 0", unlike)
    return OwnReading(name, rows, others, digest), adapter


def check_separate(config: RunConfig) -> None:
    """Refuse ranks that share a sample with a ConfigError: not all of them see where its documents end."""
    for degree in ("tensor", "pipeline", "context"):
        if (got := getattr(config.parallel, degree)) > 1:
            raise ConfigError(
                f"data.documents: got separate, and parallel.{degree} is {got}; ranks that share a sample cannot keep "
                f"its documents apart; expected joined, or parallel.{degree} 1"
            )


def _both(given: object, name: str) -> tuple[Any, Any]:
    """Samples to train on, and those held out."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        kind = f"{type(given).__name__}{f' of {len(given)}' if isinstance(given, (tuple, list)) else ''}"
        raise DataError(
            f"{name}.samples() gave {kind}, expected two: samples to train on, and those held out or None"
        )
    return given[0], given[1]


def _check_no_text(config: RunConfig, name: str) -> None:
    """Refuse options that only mean something for tokens."""
    if config.evaluation.tasks:
        raise ConfigError(
            f"evaluation.lm_eval: got {config.evaluation.lm_eval}, and {name} reads no text; leave it out"
        )
    default = DataOptions()
    for option in ("path", "tokenizer", "documents"):
        got = getattr(config.data, option)
        if got != getattr(default, option):
            raise ConfigError(
                f"data.{option}: got {got!r}, and {name} brings its own samples; leave it out, and give the factory "
                "what it needs in model.arguments"
            )
    if config.parallel.context > 1:
        raise ConfigError(
            f"parallel.context: got {config.parallel.context}, but samples of {name} are no sequences of tokens that "
            "ranks could share; expected 1"
        )
