"""Models in plain PyTorch; this package imports nothing from the rest of hpczero.

``config`` and ``presets`` need no torch, so importing this package does not start it: the network classes are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hpczero.models.config import (
    PRESETS,
    GPTConfig,
    flops_per_token,
    parameter_count,
    parameter_shapes,
)

if TYPE_CHECKING:
    from hpczero.models.gpt import GPT, Block, generate
    from hpczero.models.initial import Deviates

__all__ = [
    "GPT",
    "PRESETS",
    "Block",
    "Deviates",
    "GPTConfig",
    "flops_per_token",
    "generate",
    "parameter_count",
    "parameter_shapes",
]

_MODULE_OF = {"GPT": "gpt", "Block": "gpt", "Deviates": "initial", "generate": "gpt"}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
