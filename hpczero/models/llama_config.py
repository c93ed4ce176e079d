"""The sizes of a Llama-like decoder, and Hugging Face's words for them.

Owns: the sizes, their validation, and the two ways to and from ``config.json``. Must not know: torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpczero.models.config import check_sizes

# Hugging Face's name of each; what it leaves out is what LlamaConfig of transformers takes.
THEIRS = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# What must stand there for the two models to give the same logits; absent means the first.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0, 0),
    "rope_scaling": (None,),
    "head_dim": (None,),
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of a Llama-like decoder.

    Args:
        vocab_size: Number of token ids.
        context: Longest sequence, in tokens.
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        heads: Query heads; divides ``hidden``.
        key_value_heads: Heads of keys and values; divides ``heads``.
        ffn: Width of the MLP.
        rope_theta: Base of the rotary angles.
        norm_epsilon: Added to the mean square.
        tie_embeddings: The head shares its weight with the token embedding.

    Raises:
        ValueError: A size or combination that cannot work.
    """

    vocab_size: int
    context: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    ffn: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "context", "layers", "hidden", "heads", "key_value_heads", "ffn")
        check_sizes("LlamaConfig", **{name: getattr(self, name) for name in sizes})
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"LlamaConfig: hidden is {self.hidden} and heads {self.heads}, expected an even number for each head"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"LlamaConfig: heads is {self.heads}, expected a multiple of key_value_heads, which is "
                f"{self.key_value_heads}"
            )
        if not (self.rope_theta > 0 and self.norm_epsilon > 0):
            raise ValueError("LlamaConfig: rope_theta and norm_epsilon must be above 0")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward for one token: 6 for each weight of a product, and those of causal attention.

        Source: Kaplan et al., arXiv 2001.08361, table 1, with half of the positions seen.
        """
        heads = 2 * (self.heads + self.key_value_heads) * self.head_size
        block = self.hidden * heads + 3 * self.hidden * self.ffn
        products = self.layers * block + self.hidden * self.vocab_size
        return 6.0 * products + 6.0 * self.layers * self.context * self.hidden

    def to_hugging_face(self) -> dict[str, Any]:
        """What ``config.json`` says of this model."""
        fixed = {name: values[0] for name, values in FIXED.items() if values[0] is not None}
        theirs = {theirs: getattr(self, ours) for ours, theirs in THEIRS.items()}
        return {"architectures": ["LlamaForCausalLM"], **fixed, **theirs}

    @classmethod
    def from_hugging_face(cls, found: Mapping[str, Any]) -> LlamaConfig:
        """The sizes that a ``config.json`` of a Llama says.

        Raises:
            ValueError: it is of another model, or of a Llama that would give other logits here.
        """
        said = dict(found)
        parameters = said.pop("rope_parameters", None) or {}  # as transformers 5 writes them
        if parameters.get("rope_type", "default") != "default":
            said["rope_scaling"] = parameters
        said.setdefault("rope_theta", parameters.get("rope_theta", 10000.0))
        said.setdefault("num_key_value_heads", said.get("num_attention_heads"))
        said.setdefault("tie_word_embeddings", False)
        said.setdefault("rms_norm_eps", 1e-6)
        missing = [theirs for theirs in THEIRS.values() if said.get(theirs) is None]
        if missing:
            raise ValueError(f"config.json of a Llama: {', '.join(missing)} missing")
        if said.get("head_dim") == said["hidden_size"] // said["num_attention_heads"]:
            said["head_dim"] = None
        for name, values in FIXED.items():
            got = said.get(name, values[0])
            if got not in values:
                raise ValueError(
                    f"config.json of a Llama: {name} is {got!r}, expected {values[0]!r}, which hpczero.models.Llama has"
                )
        return cls(**{ours: said[theirs] for ours, theirs in THEIRS.items()})
