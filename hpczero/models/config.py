"""The sizes of a GPT or a Llama, and what follows from them by arithmetic: parameter shapes, parameter count, FLOPs.

torch is not imported: the plan command asks for a model of a hundred billion parameters without building one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from typing_extensions import override

MOST_LAYERS = 10**4
MOST_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and switches of a GPT-2 style decoder.

    Args:
        vocab_size: Number of token ids.
        context: Longest sequence, in tokens.
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        heads: Attention heads per block; divides ``hidden``.
        ffn_multiple: Width of the MLP as a multiple of ``hidden``.
        positions: "learned" position embeddings as in GPT-2, or "rotary" ones, which have no parameters.
        tie_embeddings: The head shares its weight with the token embedding.
        dropout: Probability, on the embeddings, the attention and both residual branches.
        checkpoint_activations: Keep only the input of each block and recompute the rest in backward.
        separator: Id of the token that ends a document. Attention then stays within documents, and positions begin
            anew in each. None: a sequence is one text.

    Raises:
        ValueError: A size or combination that cannot work; the message names every field at fault.
    """

    vocab_size: int
    context: int
    layers: int
    hidden: int
    heads: int
    ffn_multiple: int = 4
    positions: Literal["learned", "rotary"] = "learned"
    tie_embeddings: bool = True
    dropout: float = 0.0
    checkpoint_activations: bool = False
    separator: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "context", "layers", "hidden", "heads", "ffn_multiple")
        faults = [
            f"{name} is {getattr(self, name)}, expected at least 1"
            for name in sizes
            if getattr(self, name) < 1
        ]
        faults += [
            f"{name} is larger than any model's, expected at most {most}"
            for name in sizes
            if getattr(self, name) > (most := MOST_LAYERS if name == "layers" else MOST_SIZE)
        ]
        if not 0.0 <= self.dropout < 1.0:
            faults.append(f"dropout is {self.dropout}, expected 0 <= dropout < 1")
        if self.positions not in ("learned", "rotary"):
            faults.append(f"positions is {self.positions!r}, expected 'learned' or 'rotary'")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            faults.append(f"separator is {self.separator}, expected 0 to {self.vocab_size - 1}")
        if not faults and self.hidden % self.heads:
            faults.append(
                f"hidden is {self.hidden}, expected a multiple of heads, which is {self.heads}"
            )
        if not faults and self.positions == "rotary" and self.head_size % 2:
            faults.append(
                f"hidden / heads is {self.head_size}, expected an even number for rotary positions"
            )
        if faults:
            raise ValueError("GPTConfig: " + "; ".join(faults))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    # What `DecoderConfig` has otherwise; plans and predictions ask for these alone.
    gated: ClassVar[bool] = False
    experts: ClassVar[int] = 1
    active: ClassVar[int] = 1

    @property
    def query_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token, and of all its values."""
        return self.query_width

    @property
    def ffn_width(self) -> int:
        """Width of the MLP, or of one expert."""
        return self.ffn_multiple * self.hidden


def parameter_shapes(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter of ``GPT(config)``, in registration order; a tied weight comes once.

    Those of a `DecoderConfig` have the names of a GPT, and products that are read together are one.
    """
    if isinstance(config, DecoderConfig):
        yield from config.shapes()
        return
    ffn = config.ffn_multiple * config.hidden
    sizes = (config.vocab_size, config.context, config.layers, config.hidden, ffn)
    without = {"wpe.weight"} if config.positions == "rotary" else set()
    without |= {"lm_head.weight"} if config.tie_embeddings else set()
    for name, shape in gpt_shapes(*sizes):
        if name not in without:
            yield name, shape


def gpt_shapes(
    vocab_size: int, context: int, layers: int, hidden: int, ffn: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As ``parameter_shapes``, of a GPT with learned positions and an untied head."""
    yield "wte.weight", (vocab_size, hidden)
    yield "wpe.weight", (context, hidden)
    for layer in range(layers):
        for name, shape in (
            ("attention_norm.weight", (hidden,)),
            ("attention_norm.bias", (hidden,)),
            ("attention.qkv.weight", (3 * hidden, hidden)),
            ("attention.qkv.bias", (3 * hidden,)),
            ("attention.projection.weight", (hidden, hidden)),
            ("attention.projection.bias", (hidden,)),
            ("mlp_norm.weight", (hidden,)),
            ("mlp_norm.bias", (hidden,)),
            ("mlp.expansion.weight", (ffn, hidden)),
            ("mlp.expansion.bias", (ffn,)),
            ("mlp.projection.weight", (hidden, ffn)),
            ("mlp.projection.bias", (hidden,)),
        ):
            yield f"blocks.{layer}.{name}", shape
    yield "final_norm.weight", (hidden,)
    yield "final_norm.bias", (hidden,)
    yield "lm_head.weight", (vocab_size, hidden)


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters of ``GPT(config)``, a tied weight counted once."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


def flops_per_token(config: GPTConfig, seq_len: int | None = None) -> int:
    """Model FLOPs that forward and backward of one token need; recomputation does not count.

    ``6 N + 12 L C T``: two FLOPs per weight in forward, four in backward, and the two attention products over the whole
    sequence, where C is the width of all queries. N leaves out tables that are only looked up: the position embedding
    and an untied token embedding; and of experts those that a token does not pass.

    Args:
        config: The model.
        seq_len: T, tokens per sequence; None means the full context.

    Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
    """
    lookups = {"wpe.weight"} if config.tie_embeddings else {"wpe.weight", "wte.weight"}
    multiplied = sum(
        math.prod(shape) for name, shape in parameter_shapes(config) if name not in lookups
    )
    matrices = 3 if config.gated else 2
    idle = (config.experts - config.active) * matrices * config.hidden * config.ffn_width
    attention = 12 * config.layers * config.query_width * (seq_len or config.context)
    return 6 * (multiplied - config.layers * idle) + attention


def check_sizes(owner: str, **sizes: object) -> None:
    """Refuse sizes of a model or a data set, by name, below 1; ``owner`` is what they are of.

    Raises:
        ValueError: the message names all that are wrong.
    """
    faults = [
        f"{name} is {size!r}, expected a whole number of at least 1"
        for name, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    if faults:
        raise ValueError(f"{owner}: {'; '.join(faults)}")


BYTE_VOCAB = 257  # 256 byte values and the document separator
GPT2_VOCAB = 50257


def _small(layers: int, hidden: int, heads: int, context: int = 256) -> GPTConfig:
    return GPTConfig(
        vocab_size=BYTE_VOCAB,
        context=context,
        layers=layers,
        hidden=hidden,
        heads=heads,
        positions="rotary",
    )


def _gpt2(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(vocab_size=GPT2_VOCAB, context=1024, layers=layers, hidden=hidden, heads=heads)


PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        # For a laptop, on bytes.
        "gpt-micro": _small(layers=2, hidden=64, heads=2, context=64),
        "gpt-nano": _small(layers=4, hidden=256, heads=4),
        # Radford et al. 2019, table 2; head counts from the released weights.
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        # Rajbhandari et al., ZeRO, SC20 (arXiv 1910.02054v3), appendix, table of figure 2; sequence length 1024.
        "gpt-8b": _gpt2(72, 3072, 24),
        "gpt-40b": _gpt2(88, 6144, 32),
        "gpt-60b": _gpt2(132, 6144, 32),
        "gpt-80b": _gpt2(100, 8192, 64),
        "gpt-100b": _gpt2(125, 8192, 64),
        "gpt-120b": _gpt2(150, 8192, 64),
        "gpt-140b": _gpt2(175, 8192, 64),
        "gpt-170b": _gpt2(212, 8192, 64),
        # The same paper, figure 3 (super-linear speed-up): 60 B by width instead of depth.
        "gpt-60b-wide": _gpt2(75, 8192, 32),
    }
)


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


# Decoders of Hugging Face that a plan counts without building them: whether queries, keys and values have biases, and
# whether each head's queries and keys are normalised.
DECODERS = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(GPTConfig):
    """Sizes of a decoder with grouped queries, a gated MLP (SwiGLU), and perhaps experts, as plans count it.

    hpczero builds none of it: a model of transformers, or your own, has these sizes.

    Args:
        key_value_heads: heads of keys and of values; divides ``heads``.
        ffn: width of the MLP, or of one expert.
        head_dim: width of a head; 0: ``hidden / heads``.
        experts: MLPs of a block; with one there is no router.
        active: experts that each token passes.
        qkv_bias: whether queries, keys and values have biases.
        head_norms: whether queries and keys of each head are normalised.

    Raises:
        ValueError: a size or combination that cannot work.
    """

    key_value_heads: int
    ffn: int
    head_dim: int = 0
    experts: int = 1  # type: ignore[misc]  # a constant of all GPTs, a size of these
    active: int = 1  # type: ignore[misc]
    qkv_bias: bool = False
    head_norms: bool = False
    positions: Literal["learned", "rotary"] = "rotary"
    tie_embeddings: bool = False
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("key_value_heads", "ffn", "experts", "active")
        check_sizes("DecoderConfig", **{name: getattr(self, name) for name in sizes})
        if self.heads % self.key_value_heads or self.active > self.experts:
            raise ValueError(
                f"DecoderConfig: got {self.heads} heads with {self.key_value_heads} key_value_heads and {self.active} "
                f"active of {self.experts} experts, expected a divisor of the heads, and no more than there are"
            )

    @property
    @override
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    @override
    def key_width(self) -> int:
        return self.key_value_heads * self.head_size

    @property
    @override
    def ffn_width(self) -> int:
        return self.ffn

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter; each weight of all experts is one."""
        hidden, wide = self.hidden, self.experts * self.ffn
        yield "wte.weight", (self.vocab_size, hidden)
        for layer in range(self.layers):
            block = f"blocks.{layer}."
            yield f"{block}attention_norm.weight", (hidden,)
            for name, width in (("q", self.query_width), ("kv", 2 * self.key_width)):
                yield f"{block}attention.{name}.weight", (width, hidden)
                if self.qkv_bias:
                    yield f"{block}attention.{name}.bias", (width,)
            if self.head_norms:
                yield f"{block}attention.head_norms.weight", (2 * self.head_size,)
            yield f"{block}attention.projection.weight", (hidden, self.query_width)
            yield f"{block}mlp_norm.weight", (hidden,)
            if self.experts > 1:
                yield f"{block}mlp.router.weight", (self.experts, hidden)
            yield f"{block}mlp.expansion.weight", (2 * wide, hidden)
            yield f"{block}mlp.projection.weight", (hidden, wide)
        yield "final_norm.weight", (hidden,)
        if not self.tie_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)

    @classmethod
    def from_hugging_face(cls, found: Mapping[str, Any]) -> DecoderConfig:
        """The sizes that a ``config.json`` says, of one of ``DECODERS``.

        Raises:
            ValueError: it is of another model, or a size is missing or impossible.
        """
        kind = found.get("model_type")
        if kind not in DECODERS or any(found.get(name) for name in ("attention_bias", "mlp_bias")):
            raise ValueError(
                f"config.json: model_type is {kind!r}, expected one of {', '.join(DECODERS)}, without attention_bias "
                "and mlp_bias"
            )
        names = [theirs for ours, theirs in THEIRS.items() if ours in SIZES]
        missing = [name for name in names if found.get(name) is None]
        if missing:
            raise ValueError(f"config.json of a {kind}: {', '.join(missing)} missing")
        experts = {ours: found[name] for ours, name in EXPERTS.items() if kind == "mixtral"}
        bias, norms = DECODERS[kind]
        return cls(
            **{ours: found[theirs] for ours, theirs in THEIRS.items() if ours in SIZES},
            key_value_heads=found.get("num_key_value_heads") or found["num_attention_heads"],
            head_dim=found.get("head_dim") or 0,
            tie_embeddings=bool(found.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            head_norms=norms,
            **experts,
        )


SIZES = ("vocab_size", "context", "layers", "hidden", "heads", "ffn")
EXPERTS = {"experts": "num_local_experts", "active": "num_experts_per_tok"}
