"""Parallel: one copy of a model over several ranks, beside the shards of ZeRO: its layers, its tokens or its blocks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.parallel.pipeline.stages import Stages, cut, gpt_stages, hugging_face_stages
    from hpczero.parallel.tensor import (
        Kept,
        Rule,
        Split,
        close,
        gpt_rule,
        llama_rule,
        own_tokens,
        share_sequence,
        split,
        split_cross_entropy,
    )

__all__ = [
    "Kept",
    "Rule",
    "Split",
    "Stages",
    "close",
    "cut",
    "gpt_rule",
    "gpt_stages",
    "hugging_face_stages",
    "llama_rule",
    "own_tokens",
    "share_sequence",
    "split",
    "split_cross_entropy",
]


# Loaded on first use: schedules are looked at where there is no torch.
_HOME = dict.fromkeys(__all__, "hpczero.parallel.tensor") | dict.fromkeys(
    ("Stages", "cut", "gpt_stages", "hugging_face_stages"), "hpczero.parallel.pipeline.stages"
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpczero.parallel' has no attribute {name!r}")
