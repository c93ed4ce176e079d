"""Architectures of transformers in tiny configurations, trained with ``labels=...``; nothing is downloaded.

A model is named by its classes and built when a test asks for it: importing transformers takes seconds.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import Construct, Place
from tests.helpers.small_models import seeded

VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WIDE = {**SMALL, "intermediate_size": 20, "max_position_embeddings": 32}
LLAMA = {**WIDE, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**WIDE}
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
    **SMALL,
    "intermediate_size": 20,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
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
    """A model of transformers: its class, its configuration's class and what is set in it; without dropout."""

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
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float) and name not in self.options:
                setattr(config, name, 0.0)
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


def of(name: str, model: str, options: dict[str, Any], *more: Any, **named: Any) -> Architecture:
    """By the class of its model alone."""
    family = re.sub(r"(For|LMHead|Model).*", "", model)
    return Architecture(name, model, f"{family}Config", options, *more, **named)


ARCHITECTURES = [
    of("gpt2", "GPT2LMHeadModel", GPT),
    of(
        "gpt-neo",
        "GPTNeoForCausalLM",
        {
            **SMALL,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "window_size": 4,
        },
    ),
    of("gpt-neox", "GPTNeoXForCausalLM", WIDE),
    of("gptj", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    of("llama", "LlamaForCausalLM", LLAMA, padded),
    of("mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    of(
        "mixtral",
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    of("qwen2", "Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    of("qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    of("gemma2", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8}),
    of("phi", "PhiForCausalLM", LLAMA),
    of("phi3", "Phi3ForCausalLM", LLAMA),
    of(
        "opt",
        "OPTForCausalLM",
        {**WIDE, "ffn_dim": 20, "word_embed_proj_dim": 12, "pad_token_id": 0},
    ),
    of("bloom", "BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": 2}),
    of(
        "falcon",
        "FalconForCausalLM",
        {**SMALL, "alibi": False, "new_decoder_architecture": False},
    ),
    of(
        "mpt",
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
    ),
    of("mamba", "MambaForCausalLM", {**SMALL, "state_size": 4}),
    of("bert", "BertForMaskedLM", BERT, padded),
    of("bert-classifier", "BertForSequenceClassification", BERT, classes),
    of("roberta", "RobertaForMaskedLM", {**BERT, "pad_token_id": 1}),
    of(
        "distilbert",
        "DistilBertForMaskedLM",
        {**WIDE, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20},
    ),
    of("albert", "AlbertForMaskedLM", {**BERT, "embedding_size": 12}),
    of("electra", "ElectraForMaskedLM", {**BERT, "embedding_size": 12}),
    of(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    ),
    of("mpnet", "MPNetForMaskedLM", BERT),
    of(
        "xlnet",
        "XLNetLMHeadModel",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 20},
    ),
    of(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 20,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        pair,
    ),
    of("bart", "BartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 32}, pair),
    of(
        "whisper",
        "WhisperForConditionalGeneration",
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
    of("vit", "ViTForImageClassification", PICTURE, pictures),
    of("deit", "DeiTForImageClassification", PICTURE, pictures),
    of(
        "swin",
        "SwinForImageClassification",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
        pictures,
    ),
    of(
        "convnext",
        "ConvNextForImageClassification",
        {"hidden_sizes": [6, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        large_pictures,
    ),
    of(
        "resnet",
        "ResNetForImageClassification",
        {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 1], "layer_type": "basic"},
        large_pictures,
    ),
    of(
        "clip",
        "CLIPModel",
        {"projection_dim": 10},
        captions,
        nested={
            "text_config": (
                "CLIPTextConfig",
                {**WIDE, "eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "pad_token_id": 0},
            ),
            "vision_config": ("CLIPVisionConfig", PICTURE),
        },
    ),
    of("wav2vec2", "Wav2Vec2ForCTC", SPEECH, sound),
    of("hubert", "HubertForCTC", SPEECH, sound),
]
CONSTRUCTS = [each.construct() for each in ARCHITECTURES]
