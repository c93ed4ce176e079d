"""Llama-like decoders of text, under the names and layouts of Hugging Face.

torch is imported when a model is built.

    python -m hpczero.train --model.factory hpczero.adapters.llama:build --model.arguments '{"hidden": 128, "heads": 4}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpczero.adapters.gpt import DecoderAdapter
from hpczero.errors import ConfigError
from hpczero.files.regular import parse_json, read_bytes, reason
from hpczero.models.config import LlamaConfig, check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpczero.parallel.pipeline.stages import Stages
    from hpczero.parallel.tensor.functions import Rule

CONFIG_NBYTES = 2**20
ANY_VOCABULARY = 257  # until the tokenizer is known


@dataclass(frozen=True)
class LlamaAdapter(DecoderAdapter):
    """A Llama. Its initial weights are drawn as transformers draws them."""

    config: LlamaConfig

    @property
    def flops_per_token(self) -> float:
        """By ``LlamaConfig.flops_per_token``."""
        return self.config.flops_per_token

    def build(self) -> nn.Module:
        """The network."""
        from hpczero.models.llama import Llama

        return Llama(self.config)

    def tensor_rule(self) -> Rule:
        """By groups of heads, the MLP and the vocabulary, as Hugging Face's own Llama."""
        from hpczero.parallel.tensor.models import llama_rule

        return llama_rule(SimpleNamespace(**self.config.to_hugging_face()))

    def stages(self, model: nn.Module) -> Stages:
        """The embedding before the layers, final norm and head after them."""
        from hpczero.parallel.pipeline.stages import llama_stages

        return llama_stages(model)

    def call_blocks_by(self, model: Any, call: Callable[..., Tensor]) -> None:
        """Each of ``model.model.layers``."""
        model.model.call_block = call


def build(
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    key_value_heads: int | None = None,
    ffn: int | None = None,
    context: int = 256,
    rope_theta: float = 10000.0,
    norm_epsilon: float = 1e-6,
    tie_embeddings: bool = False,
    config: str | None = None,
) -> LlamaAdapter:
    """The adapter, from sizes or from a ``config.json``.

    Args:
        hidden: width.
        layers: blocks.
        heads: query heads.
        key_value_heads: heads of keys and values; None: half of the query heads, or one.
        ffn: width of the MLP; None: 8/3 of ``hidden``, up to a multiple of 8.
        context: tokens in a sequence.
        rope_theta: base of the rotary angles.
        norm_epsilon: of the norms.
        tie_embeddings: whether head and embedding share a weight.
        config: path of a ``config.json`` of Hugging Face, whose sizes count instead; ``context`` stays.

    Raises:
        ConfigError: sizes do not fit together, or the file is of another model.
    """
    try:
        sizes = {"hidden": hidden, "layers": layers, "heads": heads, "context": context}
        check_sizes("hpczero.adapters.llama", **sizes)
        if config is not None:
            text = read_bytes(Path(config), CONFIG_NBYTES).decode()
            told = LlamaConfig.from_hugging_face(parse_json(text))
            return LlamaAdapter(dataclasses.replace(told, context=context))
        return LlamaAdapter(
            LlamaConfig(
                vocab_size=ANY_VOCABULARY,
                **sizes,
                key_value_heads=key_value_heads or max(1, heads // 2),
                ffn=ffn or -(-hidden * 8 // 24) * 8,
                rope_theta=rope_theta,
                norm_epsilon=norm_epsilon,
                tie_embeddings=tie_embeddings,
            )
        )
    except OSError as error:
        raise ConfigError(f"model.arguments: {config}: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"model.arguments: {error}") from error
