"""Hugging Face models: weights of a folder streamed into shards, and shards streamed into such a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.hf.hub import Hub
    from hpczero.hf.loading import load
    from hpczero.hf.saving import export, save_pretrained
    from hpczero.hf.weights import FolderWeights

__all__ = ["FolderWeights", "Hub", "export", "load", "save_pretrained"]

__getattr__ = lazy(
    __name__,
    {
        "FolderWeights": "weights",
        "Hub": "hub",
        "export": "saving",
        "load": "loading",
        "save_pretrained": "saving",
    },
)
