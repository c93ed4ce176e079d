"""Collectives: ways to move flat buffers between ranks. `base` holds the contract, the other files one way each."""

from hpczero.comm.base import Collectives, CommStats, Work
from hpczero.comm.flat import Flat

__all__ = ["Collectives", "CommStats", "Flat", "Work"]
