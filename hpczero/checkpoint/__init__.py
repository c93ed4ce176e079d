"""Checkpoints: sharded state in one HDF5 file, from which any number of ranks goes on at any stage."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.checkpoint.checkpoints import Checkpoints, save
    from hpczero.checkpoint.foreign.importing import import_weights
    from hpczero.checkpoint.reading import Loaded, load

_HOME = {
    "Checkpoints": "checkpoints",
    "Loaded": "reading",
    "import_weights": "foreign.importing",
    "load": "reading",
    "save": "checkpoints",
}

__all__ = ["Checkpoints", "Loaded", "import_weights", "load", "save"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command that lists and verifies starts neither MPI nor torch.
    if name in _HOME:
        return getattr(importlib.import_module(f"hpczero.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hpczero.checkpoint' has no attribute {name!r}")
