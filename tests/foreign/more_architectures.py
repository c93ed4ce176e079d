"""Architectures of transformers beside those of ``tests.compat``, in tiny configurations; nothing is downloaded."""

from __future__ import annotations

from tests.compat.architectures import BERT, LLAMA, SEQ2SEQ, VOCABULARY, Architecture, padded, pair

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

MORE = [
    Architecture("gemma", "GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 8}),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    Architecture("stablelm", "StableLmForCausalLM", "StableLmConfig", LLAMA, padded),
    Architecture("olmo", "OlmoForCausalLM", "OlmoConfig", LLAMA),
    Architecture("olmo2", "Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    Architecture("qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS),
    Architecture("granite", "GraniteForCausalLM", "GraniteConfig", LLAMA),
    Architecture("cohere", "CohereForCausalLM", "CohereConfig", LLAMA),
    Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {**LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    Architecture(
        "gpt-bigcode",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    Architecture("mbart", "MBartForConditionalGeneration", "MBartConfig", POSITIONS, pair),
    Architecture("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", POSITIONS, pair),
    Architecture("marian", "MarianMTModel", "MarianConfig", POSITIONS, pair),
    Architecture(
        "deberta",
        "DebertaForMaskedLM",
        "DebertaConfig",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
]
