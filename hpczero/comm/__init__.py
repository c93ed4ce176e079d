"""Collectives: transports, which move flat buffers between ranks. `collectives` has their contract."""

from hpczero.comm.choice import check_transport_name, choose
from hpczero.comm.collectives import Collectives, CommStats, Work
from hpczero.comm.flat import Flat
from hpczero.comm.hierarchical import Hierarchical

__all__ = [
    "Collectives",
    "CommStats",
    "Flat",
    "Hierarchical",
    "Work",
    "check_transport_name",
    "choose",
]
