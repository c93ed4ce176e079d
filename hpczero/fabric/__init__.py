"""Fabric: a strategy for Lightning Fabric, so that its programs train over MPI with their model in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.fabric.strategy import HpczeroStrategy as HpczeroStrategy

__getattr__, __dir__, __all__ = lazy(__name__, __file__, needs=("lightning-fabric>=2.6",))
