"""How long the collectives of a step take, and how much of that the model's own work hides.

Owns: the formulas of collectives, and what overlaps with what. Must not know: how long the model's own work takes, how
messages go between nodes (`hpczero.predict.rails`). The assumptions are those of `hpczero.predict.model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpczero.plan.layout import UnitSpec
from hpczero.plan.rounds import exchange_chunk
from hpczero.predict.job import Job
from hpczero.predict.rails import NOTHING, Cost, Rails, launches, sums_cost

AGREEMENTS = 3  # small collectives of a step: loss, finite check and norm, flags
FP32_BYTES = 4


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
    """Seconds of the collectives of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._machine = job.machine
        self._nodes, self._local = job.nodes, job.local
        self._item = job.plan.precision.param_itemsize
        footprint = job.footprint
        self._rails = Rails(
            job.machine,
            job.nodes,
            job.local,
            footprint.round_nbytes,
            spans=footprint.ranks > 1 or job.local == 1,
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

    def gather_s(self, shard_nbytes: int, *, shared: bool = True) -> float:
        """Seconds of ``gather``."""
        return self.gather(shard_nbytes, shared=shared).seconds

    def reduce_s(self, shard_numel: int) -> float:
        """Seconds of ``reduce``."""
        return self.reduce(shard_numel).seconds

    def model_parallel_s(self) -> tuple[float, float]:
        """What slicing each block costs (forward, backward): two all-reduces each.

        With checkpointing there is also an all-gather of the block's input, which is kept sharded (ZeRO paper, sec.
        6.1).
        """
        job, machine, cut = self.job, self._machine, self.job.model_parallel
        if cut == 1:
            return 0.0, 0.0
        nbytes = job.tokens * job.model.hidden * self._item
        on_one_node = cut <= machine.ranks_per_node
        # over several nodes one ring, which crosses between two nodes by one NIC
        rate = machine.node_rate if on_one_node else machine.nic_rate
        latency = machine.node_latency if on_one_node else machine.nic_latency
        one_way = (cut - 1) * (latency + nbytes / cut / rate)
        return 2 * 2 * one_way, 2 * 2 * one_way + (one_way if job.checkpointing else 0.0)

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
        before = (self._gather_of, self._gather_again_of) if gathers else (_nothing, _nothing)
        gathered = [_of_each(units, gather) for gather in before]
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
        return Exchanged(exposed, whole)

    def _gather_of(self, unit: UnitSpec) -> Cost:
        return self.gather(unit.layout.shard_numel * self._item)

    def _gather_again_of(self, unit: UnitSpec) -> Cost:
        """The gather for backward."""
        return self._gather_of(unit)

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


def _nothing(_: UnitSpec) -> Cost:
    return NOTHING


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
