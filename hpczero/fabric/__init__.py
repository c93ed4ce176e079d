"""Fabric: a strategy for Lightning Fabric, so that its programs train over MPI with their model in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.fabric.strategy import HpczeroStrategy

__all__ = ["HpczeroStrategy"]

__getattr__ = lazy(__name__, {"HpczeroStrategy": "strategy"}, needs=("lightning-fabric>=2.6",))
