"""How long the collectives of a step take, and how much of that the model's own work hides.

The assumptions are those of `hpczero.predict.model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpczero.kernels.source import MOST_BLOCKS, MOST_BLOCKS_OF_ROWS
from hpczero.plan.footprint import (
    DEVICE_ROUND_BYTES,
    IN_FLIGHT,
    exchange_chunk,
    gather_round,
    rail_chunk,
    step_peers,
)
from hpczero.plan.layout import UnitSpec
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine

# What one rank does between nodes for a gather or a reduction, and how long that takes the network and the host.
#
#     collective = rounds x (start of the round + launches of its sums) + all of its steps
#     step       = its messages on the host, then on the network, then one latency
#
# Two steps are under way at a time. So either the host or the network is always busy, or each two steps take the time
# of one alone, whichever is longer. What a round costs before its first message leaves is hidden by nothing: up to two
# steps of the round before travel meanwhile, so it is an upper bound.
#
# Time of the host is that of the thread that communicates. Another thread computes meanwhile: a collective hides behind
# compute with its host time, as far as it hides at all. Not in the model: that threads of Python wait for each other,
# what the MPI library does for a message that leaves, and other algorithms than pairs, which a measurement may choose.
#
# Source: `hpczero.comm.algorithms`, `hpczero.comm.rails`, `hpczero.kernels.tree_sum`.

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
        return cls(*map(sum, zip(*(vars(cost).values() for cost in costs), strict=True)))

    def __add__(self, other: Cost) -> Cost:
        return Cost.of_all((self, other))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(value * times for value in vars(self).values()))


NOTHING = Cost()


@dataclass(frozen=True)
class RailTimes:
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


AGREEMENTS = 3  # small collectives of a step: loss, finite check and norm, flags


@dataclass(frozen=True)
class Exchanged:
    """All collectives of one step.

    Attributes:
        exposed_s: seconds that nothing hides.
        cost: all of them.
    """

    exposed_s: float
    cost: Cost

    @property
    def hidden_s(self) -> float:
        """Seconds behind forward and backward."""
        return max(self.cost.seconds - self.exposed_s, 0.0)


class Network:
    """Seconds of the collectives of the ranks that share parameters of one pipeline stage."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._machine = job.machine
        self._nodes, self._local = job.shards.nodes, job.shards.local
        self._item = job.itemsize
        footprint = job.footprint
        self._rails = RailTimes(
            job.machine,
            self._nodes,
            self._local,
            footprint.round_nbytes,
            spans=footprint.ranks > 1 or self._local == 1,
        )

    def gather(self, shard_nbytes: int, *, shared: bool = True) -> Cost:
        """All-gather of one shard of every rank: between nodes, then inside.

        Args:
            shard_nbytes: of one rank.
            shared: whether ranks that share memory on a node need no copy of it.
        """
        if self.job.transport == "flat" and self._nodes > 1:
            return Cost(self._flat_s(shard_nbytes))
        inside = self._inside_s(self._nodes * shard_nbytes, self._local, shared=shared)
        return self._rails.gather(shard_nbytes) + Cost(inside)

    def reduce(self, shard_numel: int) -> Cost:
        """Reduce-scatter: blocks inside the node, a sum, partial sums between nodes, a sum."""
        nodes, local, work = self._nodes, self._local, self.job.work
        mine = nodes * shard_numel
        if self.job.transport == "flat":
            return self._reduce_flat(shard_numel)
        sums = self.job.plan.node_itemsize
        wire = min(self._item, sums) if local == 1 else sums
        inside = self._inside_s(mine * self._item, local, shared=True) + work.sum_s(local, mine)
        after = work.sum_s(nodes, shard_numel) if nodes > 1 else 0.0
        return Cost(inside + after) + self._rails.reduce(shard_numel, self._item, wire)

    def exchanged(self, block_f: float, block_b: float, head_b: float) -> Exchanged:
        """The collectives of one step.

        Args:
            block_f: seconds of a block's forward, behind which a collective may hide.
            block_b: the same of its backward.
            head_b: the same of the head's backward.
        """
        job, stage = self.job, self.job.plan.stage
        footprint = job.footprint
        # Flat has no queue: every call of it is over when it returns.
        hides = job.overlap and footprint.overlap and job.transport != "flat"
        gathers = stage.shards_parameters and not footprint.lasting
        whole = Cost(AGREEMENTS * self._agreement_s())
        exposed = whole.seconds
        units = job.plan.units
        gathered = [[NOTHING] * len(units)] * 2
        if gathers:
            gathered = [_of_each(units, of) for of in (self._gather_of, self._gather_again_of)]
        reduced = _of_each(units, self._reduce_of)
        for one in job.passes:
            compute = block_b if one.backward else block_f
            into = reduced if one.reduces else [NOTHING] * len(units)
            total = Cost.of_all([*gathered[one.backward], *into])
            not_hidden = total.seconds
            if hides:
                pairs = zip(gathered[one.backward], into, strict=True)
                seconds = [(gather.seconds, reduce.seconds) for gather, reduce in pairs]
                not_hidden = _not_hidden(seconds, compute, head_b * one.backward)
            whole += total * one.times
            exposed += one.times * not_hidden
        if stage.shards_optimizer and not gathers:  # the updated parameters
            after = _of_each(units, self._gather_of)
            seconds = [(gather.seconds, 0.0) for gather in after]
            whole += Cost.of_all(after)
            # In half precision the next forward waits for each unit, where no other rank sees its memory.
            late = hides and job.plan.precision.has_masters and footprint.copies == 1
            exposed += _not_hidden(seconds, block_f, 0.0) if late else Cost.of_all(after).seconds
        hidden = max(whole.seconds - exposed, 0.0)
        return Exchanged(exposed + (1 - self._machine.overlap) * hidden, whole)

    def _gather_of(self, unit: UnitSpec) -> Cost:
        """The gather for forward; with a second shard the mean over micro-batches, of which one is far."""
        far = self.gather(unit.layout.shard_numel * self._item)
        if not self.job.secondary:
            return far
        times = self.job.accumulation
        return (far + Cost(self._in_node_s(unit)) * (times - 1)) * (1 / times)

    def _gather_again_of(self, unit: UnitSpec) -> Cost:
        """The gather for backward: none where units are held, in the node with a second shard."""
        if self.job.holds_units:
            return NOTHING
        return Cost(self._in_node_s(unit)) if self.job.secondary else self._gather_of(unit)

    def _in_node_s(self, unit: UnitSpec) -> float:
        whole = unit.layout.padded_numel * self._item
        return self._inside_s(whole // self._local, self._local, shared=True)

    def _reduce_of(self, unit: UnitSpec) -> Cost:
        shard = unit.layout.shard_numel
        cost = self.reduce(shard)
        if not self.job.plan.stage.shards_optimizer:  # every rank needs the reduced gradient
            cost += self.gather(shard * FP32_BYTES, shared=False)
        return cost

    def _reduce_flat(self, shard_numel: int) -> Cost:
        """Blocks of all ranks in rounds, each summed when it is there."""
        nodes, local, work = self._nodes, self._local, self.job.work
        mine = nodes * shard_numel
        copies = mine * local * work.element_s("copy", backward=False)
        rounds = 1
        if shard_numel:
            rounds = -(-shard_numel // exchange_chunk(shard_numel, nodes * local, self._item))
        travel = self._flat_s(shard_numel * self._item, rounds) if nodes > 1 else 0.0
        travel = travel or self._inside_s(mine * self._item, local, shared=False)
        done = Cost(copies + travel + work.sum_s(nodes * local, shard_numel))
        return done + sums_cost(self._machine, launches(nodes * local), 0) * rounds

    def _inside_s(self, block_nbytes: int, local: int, *, shared: bool) -> float:
        """Seconds in which each of ``local`` ranks sends a block to each other."""
        if local == 1:
            return 0.0
        if shared and self.job.transport == "window":
            return self._machine.node_latency  # they wait for each other, and read where it lies
        rate = self._machine.node_rate
        return (local - 1) * (self._machine.node_latency + block_nbytes / rate)

    def _flat_s(self, shard_nbytes: int, rounds: int = 1) -> float:
        """Seconds of a pairwise exchange over all ranks, as if all partners were on other nodes: most are.

        Its messages are the MPI library's own, so nothing is charged for them on the host.
        """
        machine = self._machine
        far, near = (self._nodes - 1) * self._local, self._local - 1
        seconds = far * (rounds * machine.nic_latency + shard_nbytes / machine.rail_rate)
        return seconds + near * (rounds * machine.node_latency + shard_nbytes / machine.node_rate)

    def _agreement_s(self) -> float:
        """Seconds to send a few bytes of every rank to every rank."""
        machine = self._machine
        inside = math.ceil(math.log2(max(self._local, 1))) * machine.node_latency
        return inside + math.ceil(math.log2(max(self._nodes, 1))) * machine.nic_latency


def _of_each(units: Sequence[UnitSpec], of: Callable[[UnitSpec], Cost]) -> list[Cost]:
    """``of`` each unit, asked once for those of equal shape: most are."""
    known: dict[tuple[int, int], Cost] = {}
    for unit in units:
        shape = unit.layout.shard_numel, unit.layout.padded_numel
        if shape not in known:
            known[shape] = of(unit)
    return [known[unit.layout.shard_numel, unit.layout.padded_numel] for unit in units]


def _not_hidden(costs: list[tuple[float, float]], compute: float, head_b: float) -> float:
    """Seconds that are not hidden in one pass, from those of (gather, reduction) of the root and of the blocks.

    Each block hides the communication of its neighbour. Nothing runs before the first gathers. In backward the head's
    own work hides the first block's gather, and nothing hides the last reductions.
    """
    (root_gather, root_reduce), *blocks = costs
    if not blocks:
        return root_gather + root_reduce
    first, last = blocks[0], blocks[-1]
    between = sum(max(gather + reduce - compute, 0.0) for gather, reduce in blocks[1:])
    return root_gather + max(first[0] - head_b, 0.0) + between + last[1] + root_reduce
