"""The GPT of ``hpczero.models`` as the training command sees it. torch is imported when a model is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from hpczero.adapters.base import Adapter
from hpczero.models.config import GPTConfig, flops_per_token

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpczero.parallel.pipeline.stages import Stages
    from hpczero.parallel.tensor.functions import Rule


@dataclass(frozen=True)
class DecoderAdapter(Adapter):
    """A decoder of ``hpczero.models``, of the sizes that ``config`` gives, which reads text.

    Its loss is the mean cross entropy in nats per token, of inputs and targets, int64 (B, T).
    """

    config: Any

    unit = "token"
    reads_text = True
    on_meta = True

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return int(self.config.context)

    def card(self) -> Mapping[str, Any]:
        """The sizes, under the names that checkpoints and weight files use."""
        return dataclasses.asdict(self.config)

    def _with(self, **changes: Any) -> Self:
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    def with_vocabulary(self, size: int) -> Self:
        """The same sizes, with ``size`` token ids."""
        return self._with(vocab_size=size)

    def initializer(self, model: Any, seed: int) -> Callable[[str, Tensor], None]:
        """The model's own distribution of initial weights, for ``seed``."""
        fill: Callable[[str, Tensor], None] = model.initial_weights(seed=seed)
        return fill


@dataclass(frozen=True)
class GPTAdapter(DecoderAdapter):
    """A GPT."""

    config: GPTConfig

    @property
    def transformer(self) -> GPTConfig:
        """All of them: the planner knows this model."""
        return self.config

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one token, by ``hpczero.models.flops_per_token``."""
        return flops_per_token(self.config)

    def with_separator(self, separator: int) -> Self:
        """The same sizes; attention and positions stay within documents."""
        return self._with(separator=separator)

    def with_checkpointing(self, checkpointing: bool) -> Self:
        """The same sizes."""
        return self._with(checkpoint_activations=checkpointing)

    def build(self) -> nn.Module:
        """The network, with torch's default weights in it, or none on the meta device."""
        from hpczero.models.gpt import GPT

        return GPT(self.config)

    def stages(self, model: nn.Module) -> Stages:
        """Embeddings before the blocks, final norm and head after them."""
        from hpczero.parallel.pipeline.stages import gpt_stages

        return gpt_stages(model)

    def tensor_rule(self) -> Rule:
        """Heads, hidden units of the MLP and the vocabulary."""
        from hpczero.parallel.tensor import gpt_rule

        return gpt_rule(self.config)

    def call_blocks_by(self, model: Any, call: Callable[..., Tensor]) -> None:
        """Each of ``model.blocks``, on the residual stream."""
        model.call_block = call
