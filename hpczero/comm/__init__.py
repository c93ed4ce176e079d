"""Collectives: transports, which move flat buffers between ranks. `collectives` has their contract."""

from hpczero.comm.accounts import CommStats
from hpczero.comm.choice import check_transport_name, choose
from hpczero.comm.collectives import Collectives, Work
from hpczero.comm.flat import Flat
from hpczero.comm.hierarchical import Hierarchical
from hpczero.comm.hybrid import Hybrid

__all__ = [
    "Collectives",
    "CommStats",
    "Flat",
    "Hierarchical",
    "Hybrid",
    "Work",
    "check_transport_name",
    "choose",
]
