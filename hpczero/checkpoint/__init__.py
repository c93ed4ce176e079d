"""Checkpoints: sharded state in one HDF5 file, from which any number of ranks goes on at any stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.checkpoint.checkpoints import Checkpoints as Checkpoints
    from hpczero.checkpoint.checkpoints import save as save
    from hpczero.checkpoint.foreign.importing import import_weights as import_weights
    from hpczero.checkpoint.reading import Loaded as Loaded
    from hpczero.checkpoint.reading import load as load

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
