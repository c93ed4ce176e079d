"""Hugging Face models: weights of a folder streamed into shards, and shards streamed into such a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.hf.harness import evaluate as evaluate
    from hpczero.hf.hub import Hub as Hub
    from hpczero.hf.loading import load as load
    from hpczero.hf.saving import export as export
    from hpczero.hf.saving import save_pretrained as save_pretrained
    from hpczero.hf.weights import FolderWeights as FolderWeights

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
