"""Named model sizes.

Owns: the table. Must not know: torch, memory, ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpczero.models.config import GPTConfig

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
