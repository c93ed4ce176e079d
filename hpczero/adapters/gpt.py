"""The GPT of ``hpczero.models`` as the training command sees it.

Owns: nothing but the calls. Must not know: how it is sharded, fed or saved. torch is imported when a model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.adapters.base import Adapter
from hpczero.models.config import GPTConfig, flops_per_token

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpczero.parallel.pipeline.stages import Stages
    from hpczero.parallel.tensor.functions import Rule


@dataclass(frozen=True)
class GPTAdapter(Adapter):
    """A GPT of the sizes that ``config`` gives, which reads text."""

    config: GPTConfig

    unit = "token"
    reads_text = True
    on_meta = True

    @property
    def transformer(self) -> GPTConfig:
        """All of them: the planner knows this model."""
        return self.config

    def card(self) -> Mapping[str, Any]:
        """The sizes, under the names that checkpoints and weight files use."""
        return dataclasses.asdict(self.config)

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.config.context

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one token, by ``hpczero.models.flops_per_token``."""
        return flops_per_token(self.config)

    def with_vocabulary(self, size: int) -> GPTAdapter:
        """The same sizes, with ``size`` token ids."""
        return GPTAdapter(dataclasses.replace(self.config, vocab_size=size))

    def with_separator(self, separator: int) -> GPTAdapter:
        """The same sizes; attention and positions stay within documents."""
        return GPTAdapter(dataclasses.replace(self.config, separator=separator))

    def with_checkpointing(self, checkpointing: bool) -> GPTAdapter:
        """The same sizes."""
        return GPTAdapter(dataclasses.replace(self.config, checkpoint_activations=checkpointing))

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

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        """Each of ``model.blocks``, on the residual stream."""
        from hpczero.models.gpt import GPT

        assert isinstance(model, GPT), "built by this adapter"
        model.call_block = call

    def initializer(self, model: nn.Module, seed: int) -> Callable[[str, Tensor], None]:
        """GPT-2's initial weights for ``seed``."""
        from hpczero.models.gpt import GPT

        assert isinstance(model, GPT), "built by this adapter"
        return model.initial_weights(seed=seed)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy in nats per token, of inputs and targets, int64 (B, T)."""
        loss: Tensor = model(*batch)
        return loss

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Weight matrices and embeddings decay; biases and norms do not."""
        return parameter.dim() >= 2
