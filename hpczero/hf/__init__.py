"""Hugging Face models: weights of a folder streamed into shards, and shards streamed into such a folder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.hf.hub import Hub
    from hpczero.hf.loading import load
    from hpczero.hf.saving import export, save_pretrained
    from hpczero.hf.weights import FolderWeights

_HOME = {
    "FolderWeights": "weights",
    "Hub": "hub",
    "export": "saving",
    "load": "loading",
    "save_pretrained": "saving",
}

__all__ = ["FolderWeights", "Hub", "export", "load", "save_pretrained"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"hpczero.hf.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hpczero.hf' has no attribute {name!r}")
