"""Tiers: where the shards of a rank rest while nobody computes with them. Rank-local; bytes and nothing else.

A tier knows neither MPI, units, optimizers nor dtypes.
"""

from hpczero.tier.base import Fetch, Flow, Staged, Tier, Traffic
from hpczero.tier.disk import DiskTier
from hpczero.tier.host import HostTier, InPlaceTier
from hpczero.tier.lanes import Place, Record, Transfer
from hpczero.tier.staged import StagedTier, Staging

__all__ = [
    "DiskTier",
    "Fetch",
    "Flow",
    "HostTier",
    "InPlaceTier",
    "Place",
    "Record",
    "Staged",
    "StagedTier",
    "Staging",
    "Tier",
    "Traffic",
    "Transfer",
]
