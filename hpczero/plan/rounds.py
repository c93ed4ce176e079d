"""Rounds: in how many pieces blocks of gradients and parameters travel, and how many messages that makes.

Owns: the sizes of pieces and of the buffers they take, for blocks between all ranks and between nodes. Must not know:
MPI, torch, units, what is measured.

[Note: Bounded messages]
Each rank sends (G - 1) messages between G nodes in each round. Short rounds let sums and messages overlap, but every
message costs the host some microseconds. One call therefore has a largest number of messages, whatever the block and
the number of nodes: blocks travel in fewer, longer rounds where there are more peers, and at once where G - 1 alone
reaches the bound. Between few nodes, one peer at a time, short rounds stay short: there the overlap on the links is
worth more than the host's microseconds. The buffers of a round grow with G accordingly. They never pass 2 G blocks,
which is two units in the dtype of the wire divided by the ranks of a node.

Source: issue 20, item 1; docs/scale.md has the counts.
"""

from __future__ import annotations

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


def _rounds(nbytes: int, nodes: int, round_nbytes: int, most_messages: int) -> int:
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
    rounds = _rounds(nbytes, nodes, round_nbytes, GATHER_MESSAGES)
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
    rounds = _rounds(shard_numel * itemsize, nodes, min(round_nbytes, fits), EXCHANGE_MESSAGES)
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
