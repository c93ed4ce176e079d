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

# Loaded on first use: schedules are looked at where there is no torch.
_HOME = {
    "Kept": "hpczero.parallel.tensor",
    "Rule": "hpczero.parallel.tensor",
    "Split": "hpczero.parallel.tensor",
    "Stages": "hpczero.parallel.pipeline.stages",
    "close": "hpczero.parallel.tensor",
    "cut": "hpczero.parallel.pipeline.stages",
    "gpt_rule": "hpczero.parallel.tensor",
    "gpt_stages": "hpczero.parallel.pipeline.stages",
    "hugging_face_stages": "hpczero.parallel.pipeline.stages",
    "llama_rule": "hpczero.parallel.tensor",
    "own_tokens": "hpczero.parallel.tensor",
    "share_sequence": "hpczero.parallel.tensor",
    "split": "hpczero.parallel.tensor",
    "split_cross_entropy": "hpczero.parallel.tensor",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpczero.parallel' has no attribute {name!r}")
