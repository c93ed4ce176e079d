"""What one rank does between nodes for a gather or a reduction, and how long that takes the network and the host.

Owns: rounds, steps, messages and launches as the transport makes them by pairs, and their time. Must not know: units,
stages, what a model computes, how long a sum takes the device.

    collective = rounds x (start of the round + launches of its sums) + all of its steps
    step       = its messages on the host, then on the network, then one latency

Two steps are under way at a time. So either the host or the network is always busy, or each two steps take the time of
one alone, whichever is longer. What a round costs before its first message leaves is hidden by nothing: up to two
steps of the round before travel meanwhile, so it is an upper bound.

Time of the host is that of the thread that communicates. Another thread computes meanwhile: a collective hides behind
compute with its host time, as far as it hides at all. Not in the model: that threads of Python wait for each other,
what the MPI library does for a message that leaves, and other algorithms than pairs, which a measurement may choose.

Source: `hpczero.comm.algorithms.pairwise`, `hpczero.comm.between.rails`, `hpczero.kernels.tree_sum`; issue 20, item 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpczero.kernels.source import MOST_BLOCKS, MOST_BLOCKS_OF_ROWS
from hpczero.plan.rounds import (
    DEVICE_ROUND_BYTES,
    IN_FLIGHT,
    gather_round,
    rail_chunk,
    step_peers,
)
from hpczero.predict.machine import Machine

FP32_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Of one collective, or of several.

    Attributes:
        seconds: from its start to its end.
        host_s: of them, those in which the thread that communicates is busy.
        messages: between nodes, sent by one rank; a mean over micro-batches may be a fraction.
        launches: of sums on a device, by one rank.
    """

    seconds: float = 0.0
    host_s: float = 0.0
    messages: float = 0.0
    launches: float = 0.0

    @classmethod
    def of_all(cls, costs: Sequence[Cost]) -> Cost:
        """The sum."""
        return cls(
            sum(cost.seconds for cost in costs),
            sum(cost.host_s for cost in costs),
            sum(cost.messages for cost in costs),
            sum(cost.launches for cost in costs),
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost.of_all((self, other))

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.seconds * times,
            self.host_s * times,
            self.messages * times,
            self.launches * times,
        )


NOTHING = Cost()


@dataclass(frozen=True)
class Rails:
    """The way between nodes. All ranks of a node use it at once.

    Attributes:
        machine: each node is one like it.
        nodes: G.
        local: L, ranks of a node that take part.
        round_nbytes: bytes of a block that are wished to travel in one round; on devices at least DEVICE_ROUND_BYTES.
        spans: whether a rank reads in place what the others of its node have.
    """

    machine: Machine
    nodes: int
    local: int
    round_nbytes: int
    spans: bool

    def gather(self, nbytes: int) -> Cost:
        """Blocks of ``nbytes`` of every node, in place."""
        if self.nodes == 1 or not nbytes:
            return NOTHING
        rounds = -(-nbytes // gather_round(nbytes, self.nodes, self._wished))
        return self._started(rounds) + self._steps(rounds, nbytes)

    def reduce(self, shard_numel: int, itemsize: int, wire: int) -> Cost:
        """Partial sums of every node for every node, without the time that sums take where they are computed.

        On one node there are only launches.

        Args:
            shard_numel: elements of a block.
            itemsize: bytes of an element of a gradient.
            wire: the same of a partial sum on the network.
        """
        if not shard_numel:
            return NOTHING
        if self.nodes == 1:
            return sums_cost(self.machine, launches(self.local), 0)
        chunk = rail_chunk(shard_numel, self.nodes, wire, self._wished)
        rounds = -(-shard_numel // chunk)
        kernels, operations = self._sums(itemsize, wire, gaps=chunk < shard_numel)
        summed = sums_cost(self.machine, kernels, operations)
        parts = 1 if self.spans else self.nodes  # which the ranks of a node ask each other for
        return (self._started(parts) + summed) * rounds + self._steps(rounds, shard_numel * wire)

    @property
    def _wished(self) -> int:
        """Bytes of a round: the transport's own on the host, on a device what a round is worth there."""
        on_host = self.machine.shares_memory
        return self.round_nbytes if on_host else max(self.round_nbytes, DEVICE_ROUND_BYTES)

    def _started(self, rounds: int) -> Cost:
        host_s = rounds * self.machine.round_host
        return Cost(host_s, host_s)

    def _steps(self, rounds: int, nbytes: int) -> Cost:
        """All messages of blocks of ``nbytes``, in order."""
        machine, peers = self.machine, self.nodes - 1
        steps = rounds * -(-peers // step_peers(self.nodes))
        host_s = rounds * peers * machine.message_host
        on_host, on_wire = host_s / steps, peers * nbytes / machine.rail_rate / steps
        alone = on_host + on_wire + machine.nic_latency
        pairs, odd = divmod(steps, IN_FLIGHT)  # in flight: two
        longest = max(on_host, on_wire)
        seconds = max(
            alone + (steps - 1) * longest,  # the host or the network always has a next step
            (pairs + odd) * alone
            + (0.0 if odd else longest),  # steps wait for those before the last
        )
        return Cost(seconds, host_s, rounds * peers)

    def _sums(self, itemsize: int, wire: int, *, gaps: bool) -> tuple[int, int]:
        """(launches of the kernel, operations of torch) of one round: over the ranks of a node, then over nodes."""
        over_nodes = launches(self.nodes)
        rounded = int(wire < FP32_BYTES)  # a copy of the fp32 sum into what travels
        if not self.spans and self.local > 1:  # part by part, none with gaps
            return over_nodes + self.nodes * launches(self.local), self.nodes * rounded
        most = MOST_BLOCKS_OF_ROWS if gaps else MOST_BLOCKS
        return over_nodes + launches(self.local, most), rounded


def sums_cost(machine: Machine, kernels: int, operations: int) -> Cost:
    """Launches of sums. Where the host computes, a sum is no launch, and its time is that of its elements."""
    if machine.shares_memory or not machine.sum_host:
        return NOTHING
    host_s = kernels * machine.sum_host + operations * machine.dispatch
    return Cost(host_s, host_s, launches=kernels + operations)


def launches(blocks: int, most: int = MOST_BLOCKS) -> int:
    """Launches of the kernel in which so many blocks of a node each, or of one node, are summed.

    The tree is cut into equal subtrees by halving until each is small enough, and so is the tree over their sums.
    """
    count, parts = 0, 1
    while -(-blocks // parts) > most:
        parts *= 2
    if parts > 1:
        count = launches(parts, most)
    return count + parts
