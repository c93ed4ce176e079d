"""Footprint: what a transport holds and sends beside the buffers of units, as far as the plan must know it.

Each transport states its own (``Collectives.footprint``); ``footprint_of`` predicts that of a transport that does not
exist yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpczero.plan.layout import Coding

# Rounds: in how many pieces blocks of gradients and parameters travel, and how many messages that makes.
#
# [Note: Bounded messages]
# Each rank sends (G - 1) messages between G nodes in each round. Short rounds let sums and messages overlap, but every
# message costs the host some microseconds. One call therefore has a largest number of messages, whatever the block and
# the number of nodes: blocks travel in fewer, longer rounds where there are more peers, and at once where G - 1 alone
# reaches the bound. Between few nodes, one peer at a time, short rounds stay short: there the overlap on the links is
# worth more than the host's microseconds. The buffers of a round grow with G accordingly. They never pass 2 G blocks,
# which is two units in the dtype of the wire divided by the ranks of a node.
#
# docs/scale.md has the counts.

# Upper bound of the buffers that receive peers' gradient blocks, unless messages would then be too short.
EXCHANGE_BYTES = 32 * 2**20
# The same for rounds of a device: each costs the host launches and waits, and a device has more memory than that.
DEVICE_EXCHANGE_BYTES = 128 * 2**20
# Bytes of a message below which buffers grow instead.
LEAST_BYTES = 256 * 2**10
# Bytes that one message of a round between nodes carries, unless a measurement finds better: small enough that sums and
# messages overlap (a reduction between emulated hosts took 433 ms where 512 KiB took 580 and the link needs 403).
ROUND_BYTES = 2**16
# The same for memory of devices: a round costs a device launches and waits of the host, whatever its size.
DEVICE_ROUND_BYTES = 4 * 2**20
# Most messages of one rank in one call, or one to each peer. A gather is in place: its long rounds cost no memory.
GATHER_MESSAGES = 128
EXCHANGE_MESSAGES = 256
# A round between nodes goes in so many steps, if there are more peers; fewer peers have a step each. So many steps are
# under way at a time.
STEPS = 16
IN_FLIGHT = 2
# Between so few nodes rounds of up to LEAST_BYTES have the length that is wished for, up to as many messages. Longer
# ones cost 18 to 25 per cent over TCP between four emulated hosts (blocks of 8 and 32 MiB, 200 and 400 KiB, not 64).
FEW_NODES = STEPS + 1
SHORT_MESSAGES = 4096
ALIGNMENT = 64  # elements: pieces begin where the widest loads and a line of a cache begin


def _fewest_rounds(nbytes: int, nodes: int, round_nbytes: int, most_messages: int) -> int:
    """Rounds of a block of ``nbytes``, see [Note: Bounded messages]."""
    if nodes <= FEW_NODES and round_nbytes <= LEAST_BYTES:
        most_messages = SHORT_MESSAGES
    allowed = most_messages // max(nodes - 1, 1)
    return max(min(-(-nbytes // max(round_nbytes, 1)), allowed), 1)


def step_peers(nodes: int) -> int:
    """Peers of one step of a round between nodes; the last step may have fewer."""
    return max(-(-(nodes - 1) // STEPS), 1)


def gather_round(nbytes: int, nodes: int, round_nbytes: int = ROUND_BYTES) -> int:
    """Bytes of each block that one round of a gather between nodes moves, at least 1.

    Args:
        nbytes: of a block.
        nodes: G.
        round_nbytes: wished for; more where there would be too many messages.
    """
    rounds = _fewest_rounds(nbytes, nodes, round_nbytes, GATHER_MESSAGES)
    return max(min(nbytes, max(round_nbytes, -(-nbytes // rounds))), 1)


def gather_messages(nbytes: int, nodes: int, round_nbytes: int = ROUND_BYTES) -> int:
    """Messages that one rank sends for one gather between nodes, by pairs; arguments as of ``gather_round``."""
    return -(-nbytes // gather_round(nbytes, nodes, round_nbytes)) * (nodes - 1)


def rail_chunk(shard_numel: int, nodes: int, itemsize: int, round_nbytes: int = ROUND_BYTES) -> int:
    """Elements of each shard that one round of a reduction between nodes exchanges, at least 1.

    Args:
        shard_numel: elements of a rank's shard.
        nodes: G.
        itemsize: bytes of an element on the network.
        round_nbytes: wished for; less where the buffers would pass EXCHANGE_BYTES (of a device's rounds
            DEVICE_EXCHANGE_BYTES) and messages stay long enough, more where there would be too many messages.
    """
    most = EXCHANGE_BYTES if round_nbytes < DEVICE_ROUND_BYTES else DEVICE_EXCHANGE_BYTES
    fits = max(most // (4 * nodes), LEAST_BYTES)
    rounds = _fewest_rounds(
        shard_numel * itemsize, nodes, min(round_nbytes, fits), EXCHANGE_MESSAGES
    )
    if rounds == 1:
        return max(shard_numel, 1)
    wished = max(min(round_nbytes, fits) // itemsize, -(-shard_numel // rounds))
    return min(-(-wished // ALIGNMENT) * ALIGNMENT, shard_numel)


def rail_nbytes(
    shard_numel: int,
    nodes: int,
    itemsize: int,
    round_nbytes: int = ROUND_BYTES,
    *,
    alone: bool = False,
) -> int:
    """Bytes of the buffers of such a reduction: one to send and one to receive, twice if rounds overlap.

    With ``alone`` each rank sends its own gradient from where it lies, and only what comes needs memory.
    """
    chunk = rail_chunk(shard_numel, nodes, itemsize, round_nbytes)
    sides = 1 if alone else 2
    return rail_turns(shard_numel, chunk) * sides * nodes * chunk * itemsize


def coded_chunk(coding: Coding, nodes: int, round_nbytes: int = ROUND_BYTES) -> int:
    """``rail_chunk`` of a gradient in codes: whole blocks, whose codes fill a message."""
    bits, shard_numel = coding.codec.bits, coding.layout.shard_numel
    return rail_chunk(shard_numel, nodes, 1, round_nbytes * 8 // bits)


def coded_width(coding: Coding, chunk: int) -> int:
    """Words of 4 bytes of the longest row of a round."""
    total = coding.layout.shard_numel
    return max(coding.words(at, min(chunk, total - at)) for at in range(0, total, chunk))


def coded_nbytes(coding: Coding, nodes: int, round_nbytes: int = ROUND_BYTES) -> int:
    """Bytes of the buffers of such a reduction for what is sent and comes; sums before and after are beside them."""
    chunk = coded_chunk(coding, nodes, round_nbytes)
    turns = rail_turns(coding.layout.shard_numel, chunk)
    return 2 * nodes * FP32_BYTES * turns * coded_width(coding, chunk)


def rail_turns(shard_numel: int, chunk: int) -> int:
    """Buffers that rounds take in turn."""
    return 2 if chunk < shard_numel else 1


def rail_messages(
    shard_numel: int, nodes: int, itemsize: int, round_nbytes: int = ROUND_BYTES
) -> int:
    """Messages that one rank sends for one reduction between nodes, by pairs; arguments as of ``rail_chunk``."""
    chunk = rail_chunk(shard_numel, nodes, itemsize, round_nbytes)
    return -(-shard_numel // chunk) * (nodes - 1)


def exchange_chunk(shard_numel: int, num_shards: int, itemsize: int) -> int:
    """Elements of each shard that one round of a reduction between all ranks exchanges.

    All blocks fit into EXCHANGE_BYTES, unless a block would then be shorter than LEAST_BYTES.
    """
    fits = max(EXCHANGE_BYTES // num_shards, LEAST_BYTES) // itemsize
    return min(shard_numel, fits // ALIGNMENT * ALIGNMENT)


def node_chunk(ranks: int, itemsize: int, most_nbytes: int, chunk_nbytes: int) -> int:
    """Elements of each shard that are summed at a time over the ranks of one node, at least 1.

    Args:
        ranks: of the node.
        itemsize: bytes of an element.
        most_nbytes: of all ranks' elements together.
        chunk_nbytes: of those of one rank.
    """
    fits = min(chunk_nbytes, most_nbytes // ranks) // itemsize
    return max(fits // ALIGNMENT * ALIGNMENT or fits, 1)


# Carriers: where nodes have different numbers of ranks, which rank takes which elements from node to node.
#
# On equal nodes each rank has a counterpart on every other node, and moves what that one owns. On others the shards of
# node b, laid end to end, are cut into as many parts as node a has ranks. Local rank c of a carries part c. In a
# reduction it sums what the ranks of a have of it, and sends that to its owners. In a gather it receives it from them,
# for all of a. So each element crosses once from a to b in a reduction, and once from b to a in a gather.
#
#     node a: 3 ranks    node b: 2 shards    |     0     |     1     |
#                        carried by             0    |   1   |   2       local ranks of a
#
# Parts begin at multiples of ALIGNMENT elements of a shard, so short shards are carried whole.


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

    def exchange_numel(self, shard_numel: int, chunk: int) -> int:
        """Elements of the buffers of such a reduction: what it sends, and a row to receive from each node.

        Rounds that overlap take two of them in turn.
        """
        # Alignment may give more of the last round, which is shorter, than of the others.
        counts = (count for count, _ in _rounds(shard_numel, chunk))
        row = max(map(self.carried_numel, counts), default=0) + len(self.nodes) * chunk
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


Named = Literal["flat", "hierarchical", "window", "ipc"]


def fastest_transport(
    local_size: int,
    nodes: int,
    *,
    on_host: bool = True,
    rectangular: bool = True,
    shares: bool = True,
) -> Named:
    """The transport that ``auto`` means.

    Args:
        local_size: ranks of a node.
        nodes: number of nodes.
        on_host: whether what is sent lies in the memory of the host, not of devices.
        rectangular: whether all nodes have the same number of ranks.
        shares: whether ranks of a node see each other's memory.
    """
    if not rectangular:
        return "window" if on_host and shares else "hierarchical"
    if local_size > 1 and shares:
        return "window" if on_host else "ipc"
    return "hierarchical" if nodes > 1 else "flat"


FP32_BYTES = 4
# Places that serve all whole parameters where ranks of a node pull them from each other.
PULLED_IN_TURN = 2
PLACE_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Footprint:
    """What the ranks of a node hold together; the default is nothing.

    Attributes:
        ranks: ranks that share one copy of whole parameters (unless it ``pulls``) and read each other's gradients.
        lasting: whether whole parameters stay in memory while sharded, because the node holds all of them anyway.
        nodes: nodes between which partial sums travel.
        round_nbytes: bytes of one partial sum that are wished to travel in one round between nodes (``plan.rounds``).
        overlap: whether collectives go on while the model computes, so that the next unit is unsharded meanwhile.
        pulls: whether each rank has whole parameters of its own, and ranks of a node only read from each other's
            memory.
        replicas: ranks that hold the same shard and sum its gradient.
        replica_nodes: nodes that they are on.
        carriers: who moves what between nodes that have different numbers of ranks; None where they have equal ones.
        replica_carriers: the same of the nodes of replicas.
        leaves: micro-batches of a step over all ranks, where they are summed one by one; 0 where they are not.
    """

    ranks: int = 1
    lasting: bool = False
    nodes: int = 1
    round_nbytes: int = ROUND_BYTES
    overlap: bool = False
    pulls: bool = False
    replicas: int = 1
    replica_nodes: int = 1
    carriers: Carriers | None = None
    replica_carriers: Carriers | None = None
    leaves: int = 0

    @property
    def reads_peers(self) -> bool:
        """Whether gradients lie where the ranks of a node read them. A rank alone on its node does as the others."""
        return self.ranks > 1 or (self.carriers is not None and self.carriers.shares)

    def rows_of_peers(self, shards: int) -> int:
        """Rows of a round into which ranks of a node send each other gradients, of ``shards`` shards in all."""
        if self.reads_peers:
            return 0
        if self.carriers is not None:
            return self.carriers.size - 1  # its own is read where it is
        local = shards // self.nodes
        return local if local > 1 else 0

    def rail_nbytes(self, shard_numel: int, itemsize: int, *, alone: bool = False) -> int:
        """Bytes of the buffers of a reduction between nodes; arguments as of ``plan.rounds.rail_nbytes``.

        With ``alone`` a node has one rank, whose gradient has the dtype of the network; devices do not use that.
        """
        if self.carriers is not None:
            chunk = rail_chunk(shard_numel, self.nodes, itemsize, self.round_nbytes)
            return self.carriers.exchange_numel(shard_numel, chunk) * itemsize
        alone = alone and self.round_nbytes < DEVICE_ROUND_BYTES
        return rail_nbytes(shard_numel, self.nodes, itemsize, self.round_nbytes, alone=alone)

    @property
    def copies(self) -> int:
        """Number of ranks that share one copy of whole parameters."""
        return 1 if self.pulls else self.ranks

    def sums_in_place(self, num_shards: int, itemsize: int) -> bool:
        """Whether a rank collects its gradient where the mean will lie, because no other rank adds to it.

        Args:
            num_shards: ranks that share each unit.
            itemsize: bytes of an element of the gradient; the mean is fp32.
        """
        alone = num_shards == self.replicas == 1 and itemsize == FP32_BYTES
        return alone and not self.leaves  # a leaf is collected beside the sum of those before it

    def carried_sums(self, num_shards: int) -> int:
        """Sums of leaves that a rank holds between micro-steps, each of a shard, beside that where the mean will lie.

        One for each bit of the number of leaves so far; see kernels/tree_sum.py.
        """
        counts = range(num_shards, self.leaves, num_shards)
        return max((count.bit_count() for count in counts), default=1) - 1


def replicas_nbytes(footprint: Footprint, shard_numel: int, itemsize: int) -> int:
    """Bytes in which replicas of a shard sum it: what leaves, what is whole again in fp32, and what comes.

    Args:
        footprint: of the transport.
        shard_numel: elements of the largest shard.
        itemsize: bytes of an element of a partial sum.
    """
    count = footprint.replicas
    if count == 1:
        return 0
    share = -(-shard_numel // count)
    if footprint.replica_carriers is not None:
        carriers = footprint.replica_carriers
        chunk = rail_chunk(share, footprint.replica_nodes, itemsize, footprint.round_nbytes)
        comes = (carriers.exchange_numel(share, chunk) + (carriers.size - 1) * chunk) * itemsize
    elif footprint.replica_nodes > 1:
        nodes, length = footprint.replica_nodes, footprint.round_nbytes
        alone = count == nodes and length < DEVICE_ROUND_BYTES
        comes = rail_nbytes(share, nodes, itemsize, length, alone=alone)
    else:
        comes = exchange_chunk(share, count, itemsize) * count * itemsize
    return share * count * (itemsize + FP32_BYTES) + comes


def pulled_nbytes(parts: Sequence[int]) -> int:
    """Bytes of the places through which ranks of a node hand on parts of whole parameters of these sizes."""
    return PULLED_IN_TURN * (-(-max(parts, default=0) // PLACE_ALIGNMENT) * PLACE_ALIGNMENT)


def places_in_turn(sizes: Sequence[int]) -> list[int]:
    """Bytes of the places that gradients of these sizes share on a node.

    The first has its own; two serve the others.
    """
    rest = sizes[1:]
    return [max(place, default=0) for place in (sizes[:1], rest[0::2], rest[1::2])]


def footprint_of(
    transport: Named,
    *,
    ranks: int,
    local_size: int,
    carriers: Carriers | None = None,
    on_device: bool = False,
) -> Footprint:
    """The footprint that a transport of this name will have.

    Args:
        transport: its name.
        ranks: number of ranks in the group.
        local_size: number of ranks on a node.
        carriers: of nodes with different numbers of ranks, as one rank sees them; then ``local_size`` is not used.
        on_device: whether buffers are on devices, which compute by themselves: rounds are longer, and communication
            goes on beside that on one node too. With ``ipc`` they always are.
    """
    rounds = DEVICE_ROUND_BYTES if on_device or transport == "ipc" else ROUND_BYTES
    if carriers is not None and transport in ("hierarchical", "window"):
        shares = transport == "window"
        return Footprint(
            carriers.size if shares else 1,
            nodes=len(carriers.nodes),
            round_nbytes=rounds,
            overlap=True,
            carriers=replace(carriers, shares=shares),
        )
    local, nodes = min(local_size, ranks), -(-ranks // local_size)
    if transport == "flat":
        return Footprint()
    if transport == "ipc":
        return Footprint(local, nodes=nodes, round_nbytes=rounds, overlap=True, pulls=local > 1)
    if transport == "hierarchical" or local == 1:
        return Footprint(nodes=nodes, round_nbytes=rounds, overlap=on_device or nodes > 1)
    return Footprint(local, lasting=nodes == 1, nodes=nodes, overlap=nodes > 1)
