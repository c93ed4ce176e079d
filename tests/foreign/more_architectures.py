"""Architectures of transformers beside those of ``tests.compat``, in tiny configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures import BERT, GPT, LLAMA, SEQ2SEQ, Architecture, padded, pair

POSITIONS = {**SEQ2SEQ, "max_position_embeddings": 32}
EXPERTS = {
    **LLAMA,
    "moe_intermediate_size": 12,  # products of groups want rows of 16 bytes
    "shared_expert_intermediate_size": 12,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

HEADS_OF_8 = {**LLAMA, "head_dim": 8}
CAUSAL: dict[str, dict[str, Any]] = {
    "Gemma": HEADS_OF_8,
    "Olmo": LLAMA,
    "Olmo2": LLAMA,
    "Qwen2Moe": EXPERTS,
    "Granite": LLAMA,
    "Cohere": LLAMA,
    "Starcoder2": {**LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "GPTBigCode": {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
PAIRS = {
    "MBart": "MBartForConditionalGeneration",
    "Pegasus": "PegasusForConditionalGeneration",
    "Marian": "MarianMTModel",
}

MORE = [
    *(
        Architecture(kind.lower(), f"{kind}ForCausalLM", f"{kind}Config", sizes)
        for kind, sizes in CAUSAL.items()
    ),
    *(
        Architecture(kind.lower(), model, f"{kind}Config", POSITIONS, pair)
        for kind, model in PAIRS.items()
    ),
    Architecture("stablelm", "StableLmForCausalLM", "StableLmConfig", LLAMA, padded),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**HEADS_OF_8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    Architecture(
        "deberta",
        "DebertaForMaskedLM",
        "DebertaConfig",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
]
