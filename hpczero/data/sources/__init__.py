"""Sources: tokens that other programs wrote, and mixtures of several files with weights, from one TOML file."""

from __future__ import annotations

from hpczero.data.sources.mixture import MixedBatches, Turns
from hpczero.data.sources.sources import Sources, names_sources

__all__ = ["MixedBatches", "Sources", "Turns", "names_sources"]
