"""The names and shapes that Hugging Face's GPT-NeoX has for a GPT of ours with rotary positions.

Owns: their names, and what ``config.json`` must say. Must not know: files, torch, the model's class. Both store linear
weights as (out, in). Theirs has the rows of queries, keys and values head by head; ours has all queries first.

Source: transformers 5.23, models/gpt_neox; Black et al., GPT-NeoX-20B, arXiv 2204.06745, sec. 2.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpczero.adapters import gpt2
from hpczero.adapters.gpt2 import Shape

THEIRS = {
    "wte": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
THEIRS_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.projection": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.expansion": "mlp.dense_h_to_4h",
    "mlp.projection": "mlp.dense_4h_to_h",
}
_OURS = re.compile(r"blocks\.([0-9]{1,9})\.(.+)\.(weight|bias)")


def their_name(name: str) -> str:
    """GPT-NeoX's name of our parameter ``name``, which ``gpt2.check`` has let through."""
    found = _OURS.fullmatch(name)
    if found:
        return f"gpt_neox.layers.{found[1]}.{THEIRS_IN_BLOCK[found[2]]}.{found[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{THEIRS[module]}.{leaf}"


def grouped(name: str, shape: Shape, heads: int) -> Shape | None:
    """``shape`` as (3, heads, head size, ...) where theirs has heads first; None where the order is ours."""
    if ".attention.qkv." not in name:
        return None
    return (3, heads, shape[0] // (3 * heads), *shape[1:])


def their_config(
    shapes: Mapping[str, Shape], model: Mapping[str, Any], *, heads: int, tied: bool
) -> dict[str, Any]:
    """What ``config.json`` says of a model that ``gpt2.check`` has let through.

    Args:
        shapes: of all parameters, in our layout.
        model: fields of ``GPTConfig``.
        heads: attention heads.
        tied: whether the head is the token embedding.
    """
    vocab_size, hidden = shapes[gpt2.TABLE]
    layers = sum(name.endswith(".attention.qkv.weight") for name in shapes)
    dropout = float(model.get("dropout", 0.0))
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "max_position_embeddings": model["context"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": shapes["blocks.0.mlp.expansion.weight"][0] if layers else 4 * hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000,
        "attention_bias": True,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "tie_word_embeddings": tied,
        # The tokenizer's business; the defaults may lie beyond this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
