"""The rule by which Llama-like models of Hugging Face are cut: Llama, Mistral, Qwen2, Qwen3.

Owns: the names of their layers and their cuts. Must not know: transformers, how layers are cut. Configurations are read
by their attributes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hpczero.errors import PlanError
from hpczero.parallel.tensor.rule import Kept, Rule, Split

KINDS = ("llama", "mistral", "qwen2", "qwen3")


def llama_rule(config: Any) -> Rule:
    """How a ``LlamaForCausalLM``, or one of the other ``KINDS``, is cut: by groups of heads, the MLP, the vocabulary.

    All heads that share a key and value head stay with it. ``split`` refuses fewer of these than tensor parallel
    ranks, and dropout in the attention. Logits are whole on every rank, so that the model's own loss and ``generate``
    are right.

    Args:
        config: the model's ``config``.

    Raises:
        PlanError: a model of another kind.
    """
    kind = getattr(config, "model_type", None)
    if kind not in KINDS:
        raise PlanError(
            f"llama_rule: got a model of type {kind!r}, expected one of {', '.join(KINDS)}; write a Rule for it"
        )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    group = heads // config.num_key_value_heads * size
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    layers: dict[str, Split | Kept] = {
        "model.embed_tokens": Split(0, all_tokens=True),
        f"{attention}.q_proj": Split(0, grain=group, entered=True),
        f"{attention}.k_proj": Split(0, grain=size, entered=True),
        f"{attention}.v_proj": Split(0, grain=size, entered=True),
        f"{attention}.o_proj": Split(1, grain=group),
        f"{mlp}.gate_proj": Split(0, entered=True),
        f"{mlp}.up_proj": Split(0, entered=True),
        f"{mlp}.down_proj": Split(1),
        "model.layers.*.input_layernorm": Kept.STREAM,
        "model.layers.*.post_attention_layernorm": Kept.STREAM,
        "model.norm": Kept.STREAM,
        "lm_head": Split(0, joined=True, all_tokens=True),
    }
    if kind == "qwen3":
        layers |= {f"{attention}.{norm}": Kept.INSIDE for norm in ("q_norm", "k_norm")}
    return Rule(
        layers,
        entries={attention: "hidden_states", mlp: "x"},
        cut_before=("model.layers.0",),
        join_after=("model.norm",),
        check=_refuse_dropout,
    )


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "attention_dropout", 0.0):
            raise PlanError(
                f"module {name!r} drops attention weights, with masks that would be the same for other heads on other "
                "ranks; build the model with attention_dropout=0"
            )
