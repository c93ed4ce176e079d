"""Sizes: what the commands train that put layouts of ranks side by side.

Owns: the options that say so, and the work that they come to. Must not know: layouts, how one is trained, torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from scaling.layouts.cases import Work


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step.

    Attributes:
        layers, hidden, heads, vocabulary, context: of the model. It should be large beside its samples, so that the
            links show and not the cores.
        global_batch: samples of a step, the same in every layout.
        micro_batches: of a pipeline's step.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 1024
    context: int = 16
    global_batch: int = 32
    micro_batches: int = 8

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "vocabulary", "context")
        self.check_positive(*sizes, "global_batch", "micro_batches")

    def check_positive(self, *names: str) -> None:
        """Raises ConfigError where one of these options is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least 1")

    @property
    def work(self) -> Work:
        """What every layout trains."""
        model = GPTConfig(
            vocab_size=self.vocabulary,
            context=self.context,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
        )
        return Work(model, self.global_batch, self.micro_batches)
