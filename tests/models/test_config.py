"""Sizes of models: what torch builds, what the papers print, what a FLOP counter counts."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpczero.models import (
    GPT,
    PRESETS,
    GPTConfig,
    flops_per_token,
    parameter_count,
    parameter_shapes,
)
from hpczero.models.config import DecoderConfig

SMALL = GPTConfig(vocab_size=11, context=7, layers=3, hidden=12, heads=3, ffn_multiple=2)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tie", [True, False])
def test_parameter_shapes_are_those_of_the_module(positions: Any, tie: bool) -> None:
    config = dataclasses.replace(SMALL, positions=positions, tie_embeddings=tie)
    with torch.device("meta"):
        built = [(name, tuple(p.shape)) for name, p in GPT(config).named_parameters()]
    assert list(parameter_shapes(config)) == built
    assert ("lm_head.weight" in dict(built)) is not tie


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_presets_have_the_sizes_of_the_released_weights(name: str, published: int) -> None:
    assert parameter_count(PRESETS[name]) == published


def test_presets_of_the_zero_paper_give_their_label() -> None:
    labelled = [(name, match[1]) for name in PRESETS if (match := re.match(r"gpt-(\d+)b", name))]
    assert len(labelled) == 9
    for name, label in labelled:
        config = PRESETS[name]
        billions = 12 * config.layers * config.hidden**2 / 1e9  # what the paper's labels count
        assert billions == pytest.approx(float(label), rel=0.02), name
        assert config.context == 1024


def test_flops_agree_with_the_products_that_torch_counts() -> None:
    config = GPTConfig(vocab_size=512, context=64, layers=2, hidden=128, heads=4)
    model = GPT(config)
    tokens = torch.randint(512, (2, 64))
    # the math backend: torch has no count for the fused attention of the CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    # norms and biases are in N, but are no products
    assert flops_per_token(config) == pytest.approx(counted, rel=0.01)


def test_untied_head_costs_no_more_flops_than_a_tied_one() -> None:
    untied = dataclasses.replace(SMALL, tie_embeddings=False)
    assert parameter_count(untied) == parameter_count(SMALL) + 11 * 12
    assert flops_per_token(untied) == flops_per_token(SMALL)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": 13}, "hidden is 13, expected a multiple of heads, which is 3"),
        ({"layers": 0, "heads": -1}, "layers is 0, expected at least 1; heads is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"positions": "sine"}, "positions is 'sine'"),
        ({"positions": "rotary", "hidden": 15}, "hidden / heads is 5, expected an even number"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(SMALL, **change)


def test_presets_need_no_torch() -> None:
    code = (
        "import sys; from hpczero.models import PRESETS, parameter_count\n"
        "parameter_count(PRESETS['gpt-170b'])\n"
        "assert not {'torch', 'numpy', 'mpi4py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- decoders of transformers, counted without building them

DECODED: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"head_dim": 16},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Config": {"tie_word_embeddings": True},
    "Qwen3Config": {"head_dim": 16},
}


@pytest.mark.parametrize("kind", DECODED)
def test_decoders_have_the_parameters_and_flops_that_transformers_and_torch_count(
    kind: str,
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    theirs = getattr(transformers, kind)(**{**sizes, **DECODED[kind]})
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    ours = DecoderConfig.from_hugging_face(theirs.to_dict())
    assert parameter_count(ours) == sum(weight.numel() for weight in made.parameters())
    if ours.experts > 1:  # which tokens pass an expert is not known without values
        dense = dataclasses.replace(ours, experts=1, active=1)
        router = 6 * ours.layers * ours.experts * ours.hidden
        other = 6 * ours.layers * 3 * ours.hidden * ours.ffn
        assert flops_per_token(ours) == flops_per_token(dense) + router + other
        return
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.zeros((2, 32), dtype=torch.long, device="meta"))
    matrices = counter.get_total_flops() / (2 * 32)
    vectors = sum(w.numel() for w in made.parameters() if w.dim() == 1)
    assert flops_per_token(ours) == pytest.approx(3 * matrices + 6 * vectors, rel=1e-9)


def test_a_config_of_another_model_is_refused_by_name() -> None:
    for found, message in (
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox', expected one of llama, mistral"),
        ({"model_type": "llama", "vocab_size": 3}, "max_position_embeddings, .* missing"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderConfig.from_hugging_face(found)
