"""Recursive doubling, the farthest partner first.

Owns: the order of partners. Must not know: see package.

There are log2(n) steps; what is exchanged doubles from step to step. Ranks that are near in communicator order meet
last, when there is most to exchange. With nodes filled one after the other the large messages therefore stay inside the
node.
"""

from __future__ import annotations

from hpczero.comm.algorithms.base import Gather
from hpczero.comm.algorithms.blocks import Blocks


class DoublingGather(Gather):
    """All-gather of a power of two ranks.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sec. 4.1; distances reversed.
    """

    name = "doubling"

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the algorithm works on ``size`` ranks."""
        return size >= 1 and size & (size - 1) == 0

    def _gather(self, blocks: Blocks) -> None:
        # With distance d left to bridge, a rank holds every block that is congruent to it modulo 2d.
        rank, size = self.comm.rank, self.comm.size
        distance = size // 2
        while distance >= 1:
            partner, period = rank ^ distance, 2 * distance
            held = self.types.get(blocks.nbytes, blocks.stride * period)
            self.comm.Sendrecv(
                [blocks.from_block(rank % period), size // period, held],
                partner,
                recvbuf=[blocks.from_block(partner % period), size // period, held],
                source=partner,
            )
            distance //= 2
            self.messages += 1
