"""Workload: what every contender trains, so that all of them do the same work.

The command that starts the ranks reads it, and never loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpczero.errors import ConfigError
from hpczero.models.config import PRESETS, GPTConfig, parameter_count
from scaling.evidence.record import ROOT

SEED = 0  # of initial weights and data
LEARNING_RATE = 3e-4
BUFFERS = 5  # blocks of staging of each contender that stages


def gpt_sizes(layers: int, hidden: int, heads: int, vocab: int, context: int) -> GPTConfig:
    """The sizes of a GPT."""
    return GPTConfig(vocab_size=vocab, context=context, layers=layers, hidden=hidden, heads=heads)


@dataclass(frozen=True)
class Workload:
    """A GPT and the batch of one rank."""

    name: str  # on the command line and in the names of result files
    layers: int  # of the model
    hidden: int
    heads: int
    sequences: int  # of ``context`` tokens, for one rank and step
    vocab_size: int = 8192
    context: int = 128

    @property
    def model(self) -> GPTConfig:
        return gpt_sizes(self.layers, self.hidden, self.heads, self.vocab_size, self.context)

    def describe(self) -> str:
        """One line for headings."""
        return (
            f"GPT {self.layers} x {self.hidden} ({parameter_count(self.model) / 1e6:.1f} M parameters), "
            f"{self.sequences} x {self.context} tokens per rank"
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt-8x512", layers=8, hidden=512, heads=8, sequences=4),
        # the same model with so little to compute that the network shows where ranks outnumber cores
        Workload("gpt-8x512-short", layers=8, hidden=512, heads=8, sequences=1, context=32),
        Workload("gpt-12x768", layers=12, hidden=768, heads=12, sequences=2),
        # the same model with so little to compute that a disk shows
        Workload("gpt-12x768-short", layers=12, hidden=768, heads=12, sequences=1, context=32),
        Workload("tiny", layers=2, hidden=64, heads=2, sequences=2, vocab_size=256, context=32),
    )
}


@dataclass(frozen=True)
class Recommender:
    """A DLRM with tables of equal size, and the batch of one rank."""

    name: str
    tables: int
    rows: int  # of each table
    width: int  # of a row
    samples: int  # of one rank and step
    dense: int = 4  # features that are numbers

    def describe(self) -> str:
        """One line for headings."""
        return (
            f"DLRM with {self.tables} x {self.rows:,} rows of {self.width}, {self.samples} samples "
            "per rank"
        )


RECOMMENDER = Recommender("dlrm", tables=2, rows=500_000, width=16, samples=2048)


def find_model(name: str) -> GPTConfig:
    """The sizes of a workload or of a preset. Raises ConfigError: no such name."""
    if name in WORKLOADS:
        return WORKLOADS[name].model
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(
        f"--models: got {name!r}, expected some of {', '.join([*WORKLOADS, *PRESETS])}"
    )


def scratch(folder: str | None = None) -> Path:
    """The folder for what is not kept, or one on the disk of this checkout. Raises ConfigError: there is none such."""
    if folder is None:
        (ROOT / "runs" / "scratch").mkdir(parents=True, exist_ok=True)
    elif not Path(folder).is_dir():
        raise ConfigError(f"--folder: got {folder!r}, expected a folder on a disk")
    return Path(folder or ROOT / "runs" / "scratch")
