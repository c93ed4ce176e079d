"""How models that many use fall into stages.

Owns: their names of modules and the parts of their forward. Must not know: ranks, stages' sizes, how a model is cut.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hpczero.errors import PlanError
from hpczero.parallel.pipeline.stages import Stages


def gpt_stages(model: Any) -> Stages:
    """Of ``hpczero.models.GPT``: inputs are (tokens,), targets (targets,); its loss is the mean cross entropy.

    Raises:
        PlanError: the model keeps documents apart, which only a stage with the tokens could.
    """
    if model.config.separator is not None:
        raise PlanError(
            "gpt_stages: got a GPT that keeps documents apart (separator), and only the first stage has the tokens; "
            "expected separator None, or one stage"
        )

    def enter(model: Any, *inputs: Any) -> Any:
        return model.embed(*inputs)

    def call(model: Any, block: Any, x: Any) -> Any:
        return model.run(block, x)

    def leave(model: Any, x: Any, *targets: Any) -> Any:
        return model.head(x, *targets)

    positions = () if model.wpe is None else ("wpe",)
    return Stages("blocks", ("wte", *positions), ("final_norm", "lm_head"), enter, call, leave)


def llama_stages(model: Any) -> Stages:
    """The stages of ``hpczero.models.Llama``, which has Hugging Face's names and no mask to pass on."""

    def enter(model: Any, tokens: Any) -> Any:
        return model.model.embed_tokens(tokens)

    def call(model: Any, block: Any, x: Any) -> Any:
        return model.model.run(block, x)

    def leave(model: Any, x: Any, *targets: Any) -> Any:
        return model.head(model.model.norm(x), *targets)

    before, after = ("model.embed_tokens",), ("model.norm", "lm_head")
    return Stages("model.layers", before, after, enter, call, leave)


def hugging_face_stages(model: Any) -> Stages:
    """Of ``LlamaForCausalLM`` and ``GPT2LMHeadModel`` of the library transformers, for samples without padding.

    Inputs are (input_ids,), targets (labels,), which the model's own loss shifts by one. Without targets ``leave``
    returns the logits. Masks and rotary tables are made by the model's own functions, anew for every block.

    Raises:
        PlanError: another class, whose forward may do more than these parts.

    Source: ``forward`` of both classes in transformers 5.
    """
    kind = type(model).__name__
    if kind == "LlamaForCausalLM":
        return _llama_stages()
    if kind == "GPT2LMHeadModel":
        return _gpt2_stages()
    raise PlanError(
        f"hugging_face_stages: got {kind}, expected LlamaForCausalLM or GPT2LMHeadModel; say in "
        "hpczero.parallel.Stages how its forward falls into parts"
    )


def _llama_stages() -> Stages:
    def enter(model: Any, tokens: Any) -> Any:
        return model.model.embed_tokens(tokens)

    def call(model: Any, block: Any, x: Any) -> Any:
        positions, mask = _positions_and_mask(model.model, x)
        rotary = model.model.rotary_emb(x, position_ids=positions)
        return block(
            x,
            attention_mask=mask,
            position_embeddings=rotary,
            position_ids=positions,
            use_cache=False,
        )

    def leave(model: Any, x: Any, *labels: Any) -> Any:
        return _loss(model, model.lm_head(model.model.norm(x)), *labels)

    before, after = ("model.embed_tokens",), ("model.norm", "lm_head")
    return Stages("model.layers", before, after, enter, call, leave)


def _gpt2_stages() -> Stages:
    def enter(model: Any, tokens: Any) -> Any:
        base = model.transformer
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return base.drop(base.wte(tokens) + base.wpe(positions))

    def call(model: Any, block: Any, x: Any) -> Any:
        positions, mask = _positions_and_mask(model.transformer, x)
        return block(x, None, mask, None, use_cache=False, position_ids=positions)

    def leave(model: Any, x: Any, *labels: Any) -> Any:
        return _loss(model, model.lm_head(model.transformer.ln_f(x)), *labels)

    before, after = ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")
    return Stages("transformer.h", before, after, enter, call, leave)


def _positions_and_mask(base: Any, x: Any) -> tuple[Any, Any]:
    """As the model's own forward makes them; which mask there is depends on its kind of attention."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    make = sys.modules[type(base).__module__].create_causal_mask
    mask = make(
        config=base.config,
        inputs_embeds=x,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    return positions, mask


def _loss(model: Any, logits: Any, *labels: Any) -> Any:
    if not labels:
        return logits
    (targets,) = labels
    return model.loss_function(logits=logits, labels=targets, vocab_size=model.config.vocab_size)
