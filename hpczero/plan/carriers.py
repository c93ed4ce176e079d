"""Carriers: where nodes have different numbers of ranks, which rank takes which elements from node to node.

Owns: the division, and what it makes of elements and messages. Must not know: MPI, torch, buffers, sums.

On equal nodes each rank has a counterpart on every other node, and moves what that one owns. On others the shards of
node b, laid end to end, are cut into as many parts as node a has ranks. Local rank c of a carries part c. In a
reduction it sums what the ranks of a have of it, and sends that to its owners. In a gather it receives it from them,
for all of a. So each element crosses once from a to b in a reduction, and once from b to a in a gather.

    node a: 3 ranks    node b: 2 shards    |     0     |     1     |
                       carried by             0    |   1   |   2       local ranks of a

Parts begin at multiples of ALIGNMENT elements of a shard, so short shards are carried whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hpczero.plan.rounds import ALIGNMENT, rail_turns


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one shard.

    Attributes:
        rank: who has the shard, or who carries this of it.
        start: first element, from the beginning of the shard.
        numel: number of elements, at least 1.
    """

    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class Carriers:
    """The division as one rank sees it.

    Attributes:
        nodes: indices of the shards that each node owns, by local rank.
        node: number of this rank's node.
        local: place of this rank on it.
        shares: whether ranks of a node read each other's memory.
    """

    nodes: tuple[tuple[int, ...], ...]
    node: int
    local: int
    shares: bool = True

    @property
    def size(self) -> int:
        """Ranks of this node."""
        return len(self.nodes[self.node])

    @property
    def shards(self) -> int:
        """Shards of a buffer: ranks of all nodes."""
        return sum(map(len, self.nodes))

    @cached_property
    def _others(self) -> Counter[int]:
        """How many of the other nodes have how many ranks."""
        return Counter(len(ranks) for g, ranks in enumerate(self.nodes) if g != self.node)

    # --- who carries what

    def carried(self, local: int, far: int, count: int) -> tuple[Piece, ...]:
        """What local rank ``local`` of this node carries of the shards of node ``far``, by their owners.

        Args:
            local: local rank.
            far: number of another node.
            count: elements of each shard that are divided.
        """
        owners = self.nodes[far]
        return tuple(
            Piece(owners[shard], start, numel)
            for shard, start, numel in _part(local, self.size, len(owners), count)
        )

    def takers(self, far: int, count: int) -> tuple[Piece, ...]:
        """Who on node ``far`` carries what of this rank's own shard; arguments as of ``carried``."""
        ranks = self.nodes[far]
        return tuple(
            Piece(ranks[carrier], start, numel)
            for carrier, start, numel in _carriers_of(self.local, self.size, len(ranks), count)
        )

    def most_pieces(self, far: int, count: int) -> int:
        """Pieces of the rank of this node that carries most of them for node ``far``."""
        shards = len(self.nodes[far])
        return max(len(list(_part(c, self.size, shards, count))) for c in range(self.size))

    # --- what it amounts to, for this rank

    def carried_numel(self, count: int) -> int:
        """Elements that it carries for all other nodes, ``count`` of each shard."""
        return sum(
            many * sum(numel for *_, numel in _part(self.local, self.size, shards, count))
            for shards, many in self._others.items()
        )

    def reduced_numel(self, shard_numel: int, chunk: int) -> int:
        """Elements that it sends to other nodes in a reduction, whose rounds are divided one by one.

        Args:
            shard_numel: elements of a shard.
            chunk: elements of each shard in a round.
        """
        return sum(
            times * self.carried_numel(count) for count, times in _rounds(shard_numel, chunk)
        )

    def sent_at_once(self, shard_numel: int, chunk: int) -> int:
        """Most elements that it sends in one round of such a reduction.

        Alignment may give it more of the last round, which is shorter, than of the others.
        """
        counts = (count for count, _ in _rounds(shard_numel, chunk))
        return max(map(self.carried_numel, counts), default=0)

    def exchange_numel(self, shard_numel: int, chunk: int) -> int:
        """Elements of the buffers of such a reduction: what it sends, and a row to receive from each node.

        Rounds that overlap take two of them in turn.
        """
        row = self.sent_at_once(shard_numel, chunk) + len(self.nodes) * chunk
        return rail_turns(shard_numel, chunk) * row

    def reduce_messages(self, shard_numel: int, chunk: int) -> int:
        """Messages that it sends to other nodes in such a reduction."""
        return sum(
            times * many * len(list(_part(self.local, self.size, shards, count)))
            for count, times in _rounds(shard_numel, chunk)
            for shards, many in self._others.items()
        )

    def gather_messages(self, shard_numel: int, itemsize: int, round_nbytes: int) -> int:
        """Messages that it sends to other nodes in a gather.

        Args:
            shard_numel: elements of a shard.
            itemsize: bytes of an element.
            round_nbytes: most bytes of a message.
        """
        return sum(
            many * -(-numel * itemsize // round_nbytes)
            for ranks, many in self._others.items()
            for *_, numel in _carriers_of(self.local, self.size, ranks, shard_numel)
        )


def _rounds(shard_numel: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Elements of each shard in a round, and how many rounds have that many."""
    if shard_numel:
        yield chunk, shard_numel // chunk
    if shard_numel and shard_numel % chunk:
        yield shard_numel % chunk, 1


def _cut(part: int, parts: int, shards: int, count: int) -> int:
    """Where part ``part`` of ``parts`` begins in shards of ``count`` elements laid end to end."""
    shard, start = divmod(part * shards * count // parts, count)
    return shard * count + start // ALIGNMENT * ALIGNMENT


def _part(part: int, parts: int, shards: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(shard, start, numel) of what one part has of each shard."""
    if not count:
        return
    begin, end = _cut(part, parts, shards, count), _cut(part + 1, parts, shards, count)
    while begin < end:
        shard, start = divmod(begin, count)
        numel = min(end - begin, count - start)
        yield shard, start, numel
        begin += numel


def _carriers_of(shard: int, shards: int, parts: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(part, start, numel) of what each part has of one shard."""
    if not count:
        return
    # Alignment moves no part into another shard, so those that touch it without are those that may have some of it.
    for part in range(shard * parts // shards, ((shard + 1) * parts - 1) // shards + 1):
        for found, start, numel in _part(part, parts, shards, count):
            if found == shard:
                yield part, start, numel
