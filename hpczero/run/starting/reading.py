"""What a run reads: the token file of a text, or the samples that its adapter brings.

Owns: the choice, and what the rest of a run asks of either. Must not know: how tokens are made, models, steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpczero.adapters.base import Adapter
from hpczero.data import Batches, HeldOut, TokenFile
from hpczero.data.sources import MixedBatches, Sources
from hpczero.errors import ConfigError, DataError
from hpczero.job.topology import Topology
from hpczero.options.config import DataOptions, RunConfig
from hpczero.run.starting.contract import an_adapter
from hpczero.run.starting.own_samples import OwnBatches, OwnHeldOut, Rows
from hpczero.run.starting.own_text import open_tokens
from hpczero.run.starting.resume import DATA, TOKENIZER, data_of
from hpczero.run.stopping.signals import Signals


class Part(Protocol):
    """One rank's share of an evaluation round: ``data.EvaluationBatch`` or ``OwnPart``."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Inputs and targets, or what else a sample has: NumPy arrays or tensors of the host."""
        ...

    @property
    def num_samples(self) -> int:
        """How many rows count."""
        ...


class TrainingSet(Protocol):
    """Batches in the order of the run."""

    def micro_batch(
        self, step: int, micro_step: int, rank: int, world_size: int, accumulation: int = 1
    ) -> tuple[Any, ...]:
        """What one rank computes at once."""
        ...


class HeldOutSet(Protocol):
    """A fixed set, spread over ranks."""

    def __len__(self) -> int: ...

    def batches(self, *, micro_batch: int, rank: int, world_size: int) -> Iterator[Part]:
        """This rank's batches, as many on every rank."""
        ...


class Reading(Protocol):
    """The data of a run, open on every rank. Not collective."""

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint states of it."""
        ...

    def describe(self) -> str:
        """A line for the run header."""
        ...

    def training(self, config: RunConfig, context: int, global_batch: int) -> TrainingSet:
        """Batches of ``global_batch`` samples a step."""
        ...

    def held_out(self, context: int, max_samples: int) -> HeldOutSet | None:
        """Samples to evaluate on; None: there are none."""
        ...

    def loss_in_words(self, held_out_loss: float) -> str:
        """The loss with its unit, for the end of a run."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


@dataclass(frozen=True)
class TextReading:
    """Tokens of a text, or of several sources."""

    tokens: TokenFile | Sources

    def identity(self) -> Mapping[str, Any]:
        """Its digest and its tokenizer."""
        return {DATA: data_of(self.tokens), TOKENIZER: self.tokens.tokenizer.to_json()}

    def describe(self) -> str:
        """Which file it is, and how many tokens it has."""
        tokens = self.tokens
        return (
            f"data: {tokens.path}: {len(tokens.train):,} training and {len(tokens.validation):,} held-out "
            f"tokens, vocabulary of {tokens.vocab_size:,}{tokens.describe_shares()}"
        )

    def training(
        self, config: RunConfig, context: int, global_batch: int
    ) -> Batches | MixedBatches:
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
        """The digest of both sets."""
        return {DATA: self.digest}

    def describe(self) -> str:
        """Whose samples, and how many."""
        held_out = 0 if self.held_out_rows is None else len(self.held_out_rows)
        return (
            f"data: of {self.name}: {len(self.rows):,} training and {held_out:,} held-out samples"
        )

    def training(self, config: RunConfig, context: int, global_batch: int) -> OwnBatches:
        """Rows of the training set."""
        del context
        return OwnBatches(self.rows, global_batch, config.run.seed)

    def held_out(self, context: int, max_samples: int) -> OwnHeldOut | None:
        """Rows of the held-out set."""
        del context
        return None if self.held_out_rows is None else OwnHeldOut(self.held_out_rows, max_samples)

    def loss_in_words(self, held_out_loss: float) -> str:
        """As the adapter measures it."""
        return f"{held_out_loss:.4f}"

    def close(self) -> None:
        """Nothing is open."""


def open_reading(
    config: RunConfig, adapter: Adapter, topology: Topology, *, signals: Signals
) -> tuple[Reading, Adapter]:
    """The data of a run, and the adapter with the vocabulary of the tokenizer. Collective over world.

    Raises:
        DataError: data are missing or malformed, or differ between ranks; on every rank.
        ConfigError: options are about a text, and the model reads none; on every rank.
        StoppedEarly: as of ``open_tokens``.
    """
    if adapter.reads_text:
        style = config.log.progress
        tokens = open_tokens(config.data, topology, progress=style, signals=signals)
        with topology.agreed("give the model its vocabulary"):
            name = type(adapter).__name__
            adapter = an_adapter(
                adapter.with_vocabulary(tokens.vocab_size), f"{name}.with_vocabulary()"
            )
            if config.data.documents == "separate":
                check_separate(config)
                adapter = an_adapter(
                    adapter.with_separator(tokens.tokenizer.separator), f"{name}.with_separator()"
                )
            return TextReading(tokens), adapter
    with topology.agreed("open the samples of the adapter"):
        _check_no_text(config, type(adapter).__name__)
        training, held_out = _both(adapter.samples(), type(adapter).__name__)
        rows = Rows(training, f"training set of {type(adapter).__name__}")
        others = None
        if held_out is not None:
            others = Rows(held_out, f"held-out set of {type(adapter).__name__}")
        digest = f"{rows.digest()} {others.digest() if others else 'none'}"
    first = topology.broadcast_text(digest)
    with topology.agreed("compare the samples with those of rank 0"):
        if digest != first:
            raise DataError(
                f"{type(adapter).__name__}.samples() gave other samples than on rank 0; make them from a generator "
                "with a seed of its own, or bring the same files to every node"
            )
    return OwnReading(type(adapter).__name__, rows, others, digest), adapter


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
