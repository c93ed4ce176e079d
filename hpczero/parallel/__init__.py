"""Parallel: a model whose layers or blocks lie on several ranks, beside the shards of ZeRO."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.parallel.pipeline.known import gpt_stages
    from hpczero.parallel.pipeline.stages import Stages, cut

# Loaded on first use: schedules are looked at where there is no torch.
_HOME = {
    "Stages": "hpczero.parallel.pipeline.stages",
    "cut": "hpczero.parallel.pipeline.stages",
    "gpt_stages": "hpczero.parallel.pipeline.known",
}

__all__ = ["Stages", "cut", "gpt_stages"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpczero.parallel' has no attribute {name!r}")
