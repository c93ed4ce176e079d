"""Parallel: one copy of a model over several ranks, beside the shards of ZeRO: its layers, its tokens or its blocks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.parallel.pipeline.known import gpt_stages, hugging_face_stages
    from hpczero.parallel.pipeline.stages import Stages, cut
    from hpczero.parallel.tensor import close, gpt_rule, split

# Loaded on first use: schedules are looked at where there is no torch.
_HOME = {
    "Stages": "hpczero.parallel.pipeline.stages",
    "close": "hpczero.parallel.tensor",
    "cut": "hpczero.parallel.pipeline.stages",
    "gpt_rule": "hpczero.parallel.tensor",
    "gpt_stages": "hpczero.parallel.pipeline.known",
    "hugging_face_stages": "hpczero.parallel.pipeline.known",
    "split": "hpczero.parallel.tensor",
}

__all__ = ["Stages", "close", "cut", "gpt_rule", "gpt_stages", "hugging_face_stages", "split"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpczero.parallel' has no attribute {name!r}")
