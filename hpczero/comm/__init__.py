"""Collectives: transports, which move flat buffers between ranks. `collectives` has their contract.

They know no units, stages or optimizers.
"""

from hpczero.comm.calls import CommStats, Work
from hpczero.comm.choice import check_transport_name, choose
from hpczero.comm.collectives import Collectives, Flat
from hpczero.comm.hierarchical import Hierarchical
from hpczero.comm.hybrid import Hybrid
from hpczero.comm.uneven import Uneven

__all__ = [
    "Collectives",
    "CommStats",
    "Flat",
    "Hierarchical",
    "Hybrid",
    "Uneven",
    "Work",
    "check_transport_name",
    "choose",
]
