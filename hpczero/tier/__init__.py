"""Tiers: where the shards of a rank rest while nobody computes with them. Rank-local; bytes and nothing else."""

from hpczero.tier.base import Fetch, Staged, Tier
from hpczero.tier.device import DeviceTier
from hpczero.tier.disk import DiskTier
from hpczero.tier.host import HostTier
from hpczero.tier.in_place import InPlaceTier
from hpczero.tier.lanes import Transfer
from hpczero.tier.record import Place, Record
from hpczero.tier.staged import StagedTier
from hpczero.tier.staging import Staging
from hpczero.tier.traffic import Flow, Traffic

__all__ = [
    "DeviceTier",
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
