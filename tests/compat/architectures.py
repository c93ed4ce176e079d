"""Architectures of transformers in tiny configurations, trained with ``labels=...``; nothing is downloaded.

A model is named by its classes and built when a test asks for it: importing transformers takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import Construct, Place, seeded

VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WIDE = {**SMALL, "intermediate_size": 20, "max_position_embeddings": 32}
LLAMA = {**WIDE, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
PICTURE = {
    **{k: v for k, v in BERT.items() if "vocab" not in k and "max" not in k},
    "image_size": 8,
    "patch_size": 4,
}
SPEECH = {
    **{k: v for k, v in SMALL.items() if k != "vocab_size"},
    "vocab_size": VOCABULARY,
    "intermediate_size": 20,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "pad_token_id": 0,
}


def text(place: Place) -> dict[str, Tensor]:
    """Tokens (2, 7), which are the labels too."""
    ids = place.integers(VOCABULARY - 4, 2, 7) + 4
    return {"input_ids": ids, "labels": ids}


def padded(place: Place) -> dict[str, Tensor]:
    """The same, the last two of one sample masked."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    batch = text(place)
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def classes(place: Place) -> dict[str, Tensor]:
    """Tokens and one of two classes."""
    return {"input_ids": text(place)["input_ids"], "labels": place.integers(2, 2)}


def pair(place: Place) -> dict[str, Tensor]:
    """Tokens in, other tokens out."""
    return {
        **text(place),
        "labels": Place(place.rank, place.step, 9).integers(VOCABULARY - 4, 2, 5) + 4,
    }


def pictures(place: Place) -> dict[str, Tensor]:
    return {"pixel_values": place.normal(2, 3, 8, 8), "labels": place.integers(2, 2)}


def large_pictures(place: Place) -> dict[str, Tensor]:
    return {"pixel_values": place.normal(2, 3, 32, 32), "labels": place.integers(2, 2)}


def captions(place: Place) -> dict[str, Any]:
    ids = text(place)["input_ids"]
    ids[:, -1] = VOCABULARY - 1  # where CLIP looks for the end of text
    return {"input_ids": ids, "pixel_values": place.normal(2, 3, 8, 8), "return_loss": True}


def spectrogram(place: Place) -> dict[str, Tensor]:
    return {"input_features": place.normal(2, 8, 16), "labels": pair(place)["labels"]}


def sound(place: Place) -> dict[str, Tensor]:
    return {
        "input_values": place.normal(2, 160),
        "labels": place.integers(VOCABULARY - 4, 2, 3) + 4,
    }


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: its class, its configuration's class and what is set in it."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[Place], dict[str, Any]] = text
    nested: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model, in training mode."""
        library: Any = importlib.import_module("transformers")
        nested = {
            name: getattr(library, config)(**options).to_dict()
            for name, (config, options) in self.nested.items()
        }
        config = getattr(library, self.config)(**self.options, **nested)
        return seeded(lambda: getattr(library, self.model)(config)).train()

    def construct(self) -> Construct:
        """Trained by its own loss."""
        return Construct(
            self.name,
            f"`{self.model}`",
            self.build,
            batch=self.batch,
            loss=lambda model, batch: model(**batch).loss,
        )


ARCHITECTURES = [
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    Architecture(
        "gpt-neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "window_size": 4,
        },
    ),
    Architecture("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE),
    Architecture(
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        {**GPT, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    Architecture("llama", "LlamaForCausalLM", "LlamaConfig", LLAMA, padded),
    Architecture("mistral", "MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4}),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    Architecture(
        "qwen2", "Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8},
    ),
    Architecture("phi", "PhiForCausalLM", "PhiConfig", {**LLAMA, "resid_pdrop": 0.0}),
    Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", {**LLAMA, "resid_pdrop": 0.0}),
    Architecture(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {**WIDE, "ffn_dim": 20, "word_embed_proj_dim": 12, "dropout": 0.0, "pad_token_id": 0},
    ),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    Architecture(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**SMALL, "alibi": False, "new_decoder_architecture": False},
    ),
    Architecture(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
    ),
    Architecture(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    Architecture("bert", "BertForMaskedLM", "BertConfig", BERT, padded),
    Architecture(
        "bert-classifier",
        "BertForSequenceClassification",
        "BertConfig",
        {**BERT, "classifier_dropout": 0.0},
        classes,
    ),
    Architecture("roberta", "RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 1}),
    Architecture(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 20,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    Architecture(
        "albert",
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**BERT, "embedding_size": 12, "classifier_dropout_prob": 0.0},
    ),
    Architecture("electra", "ElectraForMaskedLM", "ElectraConfig", {**BERT, "embedding_size": 12}),
    Architecture(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    ),
    Architecture("mpnet", "MPNetForMaskedLM", "MPNetConfig", BERT),
    Architecture(
        "xlnet",
        "XLNetLMHeadModel",
        "XLNetConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 20,
            "dropout": 0.0,
        },
    ),
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 20,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        pair,
    ),
    Architecture(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 32},
        pair,
    ),
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        spectrogram,
    ),
    Architecture("vit", "ViTForImageClassification", "ViTConfig", PICTURE, pictures),
    Architecture("deit", "DeiTForImageClassification", "DeiTConfig", PICTURE, pictures),
    Architecture(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "drop_path_rate": 0.0,
        },
        pictures,
    ),
    Architecture(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [6, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        large_pictures,
    ),
    Architecture(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 1], "layer_type": "basic"},
        large_pictures,
    ),
    Architecture(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 10},
        captions,
        nested={
            "text_config": (
                "CLIPTextConfig",
                {**WIDE, "eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "pad_token_id": 0},
            ),
            "vision_config": (
                "CLIPVisionConfig",
                {
                    **{k: v for k, v in WIDE.items() if "vocab" not in k and "max" not in k},
                    "image_size": 8,
                    "patch_size": 4,
                },
            ),
        },
    ),
    Architecture("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, sound),
    Architecture("hubert", "HubertForCTC", "HubertConfig", SPEECH, sound),
]
CONSTRUCTS = [each.construct() for each in ARCHITECTURES]
