"""GPT and Llama with their layers split over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hpczero.comm.sums import Sums
from hpczero.errors import PlanError
from hpczero.models.config import GPTConfig
from hpczero.models.gpt import Attention
from hpczero.parallel.tensor.functions import Kept, Rule, Split, attend_by_own_masks
from hpczero.parallel.tensor.layers import ColumnLinear, joined, words_of
from hpczero.parallel.tensor.loss import split_cross_entropy
from hpczero.plan.placement import Placement


def gpt_rule(config: GPTConfig) -> Rule:
    """How a GPT is cut: by heads, by the width of the MLP, by the vocabulary.

    Heads and vocabulary need not divide by the degree. A call with targets gives the loss, without that any rank has
    all logits; one without targets gives all of them on every rank.
    """
    if config.separator is not None:
        raise PlanError(
            "gpt_rule: got a GPT that keeps documents apart (separator), whose attention tensor ranks cannot share; "
            "expected separator None, or a tensor degree of 1"
        )
    layers: dict[str, Split | Kept] = {
        "wte": Split(0),
        "blocks.*.attention_norm": Kept.STREAM,
        "blocks.*.attention.qkv": Split(0, strips=3, grain=config.head_size),
        "blocks.*.attention.projection": Split(1, grain=config.head_size),
        "blocks.*.mlp_norm": Kept.STREAM,
        "blocks.*.mlp.expansion": Split(0),
        "blocks.*.mlp.projection": Split(1),
        "final_norm": Kept.STREAM,
        "lm_head": Split(0),
    }
    if config.positions == "learned":
        layers["wpe"] = Kept.POSITIONS
    return Rule(
        layers,
        counts=("blocks.*.attention.heads",),
        dropouts=("dropout", "blocks.*.dropout"),
        check=_check,
        finish=_finish,
    )


def _check(model: nn.Module) -> None:
    """The head gives parts of logits, so the model must call what knows of them."""
    if isinstance(getattr(model, "lm_head", None), nn.Linear) and not hasattr(model, "mean_loss"):
        raise PlanError(
            f"gpt_rule: got a {type(model).__name__} with a head, expected a GPT of hpczero.models, or a part of one "
            "with its attributes finish_logits and mean_loss"
        )


def _finish(model: nn.Module, sums: Sums, sequence: bool) -> None:
    """Have the model call what knows of parts. A pipeline stage may have no head."""
    head = getattr(model, "lm_head", None)
    if isinstance(head, ColumnLinear):
        finish = partial(joined, sums=sums, placement=head.placement)
        loss = partial(_mean_loss, sums=sums, placement=head.placement)
        model.__dict__.update(finish_logits=finish, mean_loss=loss)
    for module in model.modules():
        if isinstance(module, Attention) and module.dropout > 0.0:
            module.attend = partial(attend_by_own_masks, sums=sums, inner=module.attend)


def _mean_loss(
    logits_BTV: Tensor, targets_BT: Tensor, *, sums: Sums, placement: Placement
) -> Tensor:
    """As ``models.gpt.mean_cross_entropy``: over all targets."""
    total = split_cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), sums, words_of(placement), reduction="sum"
    )
    return total / targets_BT.numel()


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
