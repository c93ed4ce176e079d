"""How the ranks of one communicator move equal blocks: one file for each algorithm.

Owns: the order of messages. Must not know: nodes, units, sums, dtypes. All algorithms move bytes and do nothing else,
so results do not depend on which one is chosen.
"""

from hpczero.comm.algorithms.base import Exchange, Gather, Meanwhile, Prepare
from hpczero.comm.algorithms.exchanges import (
    DoublingGather,
    LibraryExchange,
    LibraryGather,
    PairwiseExchange,
    PairwiseGather,
    RingGather,
)

GATHERS: tuple[type[Gather], ...] = (LibraryGather, RingGather, DoublingGather, PairwiseGather)
EXCHANGES: tuple[type[Exchange], ...] = (LibraryExchange, PairwiseExchange)

__all__ = [
    "EXCHANGES",
    "GATHERS",
    "DoublingGather",
    "Exchange",
    "Gather",
    "LibraryExchange",
    "LibraryGather",
    "Meanwhile",
    "PairwiseExchange",
    "PairwiseGather",
    "Prepare",
    "RingGather",
]
