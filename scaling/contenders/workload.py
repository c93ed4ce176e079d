"""Workload: what every contender trains, so that all of them do the same work.

Owns: the sizes. Must not know: torch (the command that starts the ranks never loads it), contenders.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.errors import ConfigError
from hpczero.models.config import PRESETS, GPTConfig, parameter_count

SEED = 0  # of initial weights and data
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Workload:
    """A GPT and the batch of one rank.

    Attributes:
        name: on the command line and in the names of result files.
        layers, hidden, heads, vocab_size, context: of the model.
        sequences: of ``context`` tokens, for one rank and step.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequences: int
    vocab_size: int = 8192
    context: int = 128

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocab_size,
            context=self.context,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
        )

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


def find_model(name: str) -> GPTConfig:
    """The sizes of a workload or of a preset.

    Raises:
        ConfigError: no such name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name].model
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(
        f"--models: got {name!r}, expected some of {', '.join([*WORKLOADS, *PRESETS])}"
    )
