"""How long the collectives of a step take, and how much of that the model's own work hides.

Owns: the formulas of collectives, and what overlaps with what. Must not know: how long the model's own work takes. The
assumptions are those of `hpczero.predict.model`.
"""

from __future__ import annotations

import math

from hpczero.plan.unit_spec import UnitSpec
from hpczero.predict.job import Job

AGREEMENTS = 3  # small collectives of a step: loss, finite check and norm, flags
FP32_BYTES = 4


class Network:
    """Seconds of the collectives of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._machine = job.machine
        self._nodes, self._local = job.nodes, job.local
        self._item = job.plan.precision.param_itemsize

    def gather_s(self, shard_nbytes: int, *, shared: bool = True) -> float:
        """All-gather of one shard of every rank: between nodes, then inside.

        Args:
            shard_nbytes: of one rank.
            shared: whether ranks that share memory on a node need no copy of it.
        """
        machine, nodes, local = self._machine, self._nodes, self._local
        if self.job.transport == "flat" and nodes > 1:
            return self._flat_s(shard_nbytes)
        rounds = nodes - 1
        if nodes & (nodes - 1) == 0:
            rounds = nodes.bit_length() - 1
        rail = rounds * machine.nic_latency + (nodes - 1) * shard_nbytes / machine.rail_rate
        return rail + self._inside_s(nodes * shard_nbytes, local, shared=shared)

    def reduce_s(self, shard_numel: int) -> float:
        """Reduce-scatter: blocks inside the node, a sum, partial sums between nodes, a sum."""
        machine, nodes, local, work = self._machine, self._nodes, self._local, self.job.work
        mine = nodes * shard_numel
        if self.job.transport == "flat":
            copies = mine * local * work.element_s("copy", backward=False)
            travel = self._flat_s(shard_numel * self._item) if nodes > 1 else 0.0
            travel = travel or self._inside_s(mine * self._item, local, shared=False)
            return copies + travel + work.sum_s(nodes * local, shard_numel)
        sums = self.job.plan.node_itemsize
        wire = min(self._item, sums) if local == 1 else sums
        rail = (nodes - 1) * (machine.nic_latency + shard_numel * wire / machine.rail_rate)
        inside = self._inside_s(mine * self._item, local, shared=True) + work.sum_s(local, mine)
        return inside + rail + (work.sum_s(nodes, shard_numel) if nodes > 1 else 0.0)

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

    def exposed(self, block_f: float, block_b: float, head_b: float) -> tuple[float, float]:
        """(seconds of communication that nothing hides, seconds of all communication) in one step."""
        job, stage = self.job, self.job.plan.stage
        footprint = job.footprint
        root, *blocks = job.plan.units
        # Flat has no queue: every call of it is over when it returns.
        hides = job.overlap and footprint.overlap and job.transport != "flat"
        gathers = stage.shards_parameters and not footprint.lasting
        exposed = whole = AGREEMENTS * self._agreement_s()
        units = (root, *blocks)
        before = (self._gather_of, self._gather_again_of) if gathers else (_nothing, _nothing)
        gathered = [[gather(unit) for unit in units] for gather in before]
        reduced = [self._reduce_of(unit) for unit in units]
        for one in job.passes:
            compute = block_b if one.backward else block_f
            costs = [
                (gather, reduce * one.reduces)
                for gather, reduce in zip(gathered[one.backward], reduced, strict=True)
            ]
            total = sum(map(sum, costs))
            whole += one.times * total
            exposed += one.times * (
                _not_hidden(costs, compute, head_b * one.backward) if hides else total
            )
        if stage.shards_optimizer and not gathers:  # the updated parameters
            costs = [(self._gather_of(unit), 0.0) for unit in units]
            after = sum(gather for gather, _ in costs)
            whole += after
            # In half precision the next forward waits for each unit, where no other rank sees its memory.
            late = hides and job.plan.precision.has_masters and footprint.copies == 1
            exposed += _not_hidden(costs, block_f, 0.0) if late else after
        return exposed, whole

    def _gather_of(self, unit: UnitSpec) -> float:
        return self.gather_s(unit.layout.shard_numel * self._item)

    def _gather_again_of(self, unit: UnitSpec) -> float:
        """Seconds of the gather for backward."""
        return self._gather_of(unit)

    def _reduce_of(self, unit: UnitSpec) -> float:
        shard = unit.layout.shard_numel
        seconds = self.reduce_s(shard)
        if not self.job.plan.stage.shards_optimizer:  # every rank needs the reduced gradient
            seconds += self.gather_s(shard * FP32_BYTES, shared=False)
        return seconds

    def _inside_s(self, block_nbytes: int, local: int, *, shared: bool) -> float:
        """Seconds in which each of ``local`` ranks sends a block to each other."""
        if local == 1:
            return 0.0
        if shared and self.job.transport == "window":
            return self._machine.node_latency  # they wait for each other, and read where it lies
        rate = self._machine.node_rate
        return (local - 1) * (self._machine.node_latency + block_nbytes / rate)

    def _flat_s(self, shard_nbytes: int) -> float:
        """Seconds of a pairwise exchange over all ranks, as if all partners were on other nodes: most are."""
        machine = self._machine
        far = (self._nodes - 1) * self._local
        seconds = far * (machine.nic_latency + shard_nbytes / machine.rail_rate)
        return seconds + (self._local - 1) * (
            machine.node_latency + shard_nbytes / machine.node_rate
        )

    def _agreement_s(self) -> float:
        """Seconds to send a few bytes of every rank to every rank."""
        machine = self._machine
        inside = math.ceil(math.log2(max(self._local, 1))) * machine.node_latency
        return inside + math.ceil(math.log2(max(self._nodes, 1))) * machine.nic_latency


def _nothing(_: UnitSpec) -> float:
    return 0.0


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
