"""Fabric: a strategy for Lightning Fabric, so that its programs train over MPI with their model in shards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from hpczero.fabric.strategy import HpczeroStrategy

__all__ = ["HpczeroStrategy"]


def __getattr__(name: str) -> Any:
    if name != "HpczeroStrategy":
        raise AttributeError(f"module 'hpczero.fabric' has no attribute {name!r}")
    try:
        home = importlib.import_module("hpczero.fabric.strategy")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning_fabric":
            raise
        raise ConfigError(
            "hpczero.fabric needs lightning_fabric, which is not installed; type: pip install 'lightning-fabric>=2.6'"
        ) from error
    return home.HpczeroStrategy
