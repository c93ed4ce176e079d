"""How long a step takes where ranks share layers, blocks, tokens and shards.

Owns: the pipeline, sums of activations, replicas, and their sum. Must not know: torch, MPI, bytes held, how a forecast
is shown. A stage's own work and its exchange of shards are those of `hpczero.predict.model`, with its assumptions.

    step = m x slowest stage + fill of the pipeline + exchange of shards that nothing hides + replicas + ties + update

More assumptions:

- sums of tensor ranks, exchanges of attention and messages between stages are hidden by nothing;
- a sum over tensor ranks is a reduction and a gather, each of whose blocks is one message; several nodes make one ring;
- the fill of a pipeline is one micro-batch of every stage but the slowest, over the groups of blocks of each stage:
  with equal stages the bubble ``(p - 1) / (v m)``;
- under a pipeline units are gathered before the first forward and reduced in the last backward of each stage, and one
  micro-batch hides what it can of that;
- replicas sum each unit as the transport between nodes does (`hpczero.predict.network`); other messages that leave a
  node cost the host one message each, and inside a node the latency holds what they cost;
- each tensor rank sends the whole output of its stage to the next, with sequence parallelism its part.

Without these degrees the forecast is that of `hpczero.predict.model.predict`.

Source: Narayanan et al., Megatron-LM on GPU clusters, arXiv 2104.04473, sec. 3; issue 19.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from hpczero.models.config import flops_per_token
from hpczero.plan.degrees import GroupSpan
from hpczero.plan.footprint import Footprint
from hpczero.plan.layout import UnitSpec
from hpczero.plan.plan import FP32_BYTES, Plan
from hpczero.plan.sent import EXCHANGES, SUMS
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job, Pass
from hpczero.predict.job import update_s as seconds_of_update
from hpczero.predict.machine import Kernels, Machine
from hpczero.predict.model import block_s, head_s, owned_numel
from hpczero.predict.network import NOTHING, Cost, Exchanged, Network, RailTimes


@dataclass(frozen=True)
class LayoutPrediction:
    """One step. Seconds of the slowest pipeline stage, where not said otherwise.

    Attributes:
        spread: what is trained, over which ranks.
        machine: each node is one like it.
        forward_s, backward_s: of all micro-batches, without any wait; recomputation is part of backward.
        sums_s: of tensor ranks, all micro-batches.
        context_s: of ranks that share tokens, all micro-batches.
        messages_s: to and from other stages, all micro-batches.
        fill_s: time in which the stage has nothing to do.
        communication_s: exchange of shards that nothing hides.
        hidden_s: exchange of shards behind forward and backward.
        replicas_s: sums of reduced gradients over replicas, and of tied weights over stages.
        update_s: norm of the gradient, optimizer.
        host_s: of the exchange of shards and of replicas, what the host of a rank spends on messages and launches.
        messages: of that exchange, between nodes, that one rank sends.
    """

    spread: Spread
    machine: Machine
    forward_s: float
    backward_s: float
    sums_s: float
    context_s: float
    messages_s: float
    fill_s: float
    communication_s: float
    hidden_s: float
    replicas_s: float
    update_s: float
    host_s: float = 0.0
    messages: int = 0

    @property
    def step_s(self) -> float:
        """The whole step."""
        computing = self.forward_s + self.backward_s + self.update_s + self.fill_s
        activations = self.sums_s + self.context_s + self.messages_s
        return computing + self.communication_s + self.replicas_s + activations

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.spread.global_batch * self.spread.model.context / self.step_s

    @property
    def tflops(self) -> float:
        """Model FLOP/s of one rank in 1e12; recomputation does not count."""
        return self.tokens_per_s * flops_per_token(self.spread.model) / self.spread.mesh.size / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak that the model FLOPs reach."""
        return self.tflops * 1e12 / self.machine.peak_of(self.spread.precision)


def predict_layout(
    spread: Spread, machine: Machine, *, kernels: Kernels | None = None, overlap: bool = True
) -> LayoutPrediction:
    """Predict one step of ``spread``.

    Args:
        spread: what is trained, over which ranks.
        machine: each node is one like it.
        kernels: of one rank; None takes a roofline of the machine.
        overlap: whether communication between nodes is hidden where possible.

    Raises:
        ConfigError: the machine has no peak for the precision.
    """
    stages = [
        StageTime(StageJob.of(spread, place, machine, kernels, overlap)) for place in spread.kinds
    ]
    counts = list(spread.kinds.values())
    slowest = max(stages, key=lambda stage: stage.turn_s)
    everybody = sum(n * stage.turn_s for n, stage in zip(counts, stages, strict=True))
    times = spread.accumulation
    return LayoutPrediction(
        spread=spread,
        machine=machine,
        forward_s=times * slowest.forward_s,
        backward_s=times * slowest.backward_s + slowest.adding_s,
        sums_s=times * slowest.sums_s,
        context_s=times * slowest.context_s,
        messages_s=times * slowest.messages_s,
        fill_s=(everybody - slowest.turn_s) / spread.interleave,
        communication_s=max(stage.exchanged.exposed_s for stage in stages),
        hidden_s=max(stage.exchanged.hidden_s for stage in stages),
        replicas_s=max(stage.replicas_s for stage in stages),
        update_s=max(stage.update_s for stage in stages),
        host_s=max(stage.exchanged.cost.host_s + stage.replicas.host_s for stage in stages),
        messages=round(
            max(stage.exchanged.cost.messages + stage.replicas.messages for stage in stages)
        ),
    )


@dataclass(frozen=True)
class StageJob(Job):
    """One pipeline stage of a tensor rank, as `hpczero.predict.model` sees a job.

    Attributes:
        spread: over which ranks.
        place: which stage.
    """

    spread: Spread = field(kw_only=True)
    place: int = 0

    @classmethod
    def of(
        cls, spread: Spread, place: int, machine: Machine, kernels: Kernels | None, overlap: bool
    ) -> StageJob:
        """The job of stage ``place``."""
        return cls(
            model=spread.model,
            machine=machine,
            ranks=spread.mesh.size,
            stage=spread.stage,
            precision=spread.precision,
            reduce=spread.reduce,
            micro_batch=spread.micro_batch,
            accumulation=spread.accumulation,
            checkpointing=spread.checkpointing,
            transport=spread.transport,
            overlap=overlap,
            model_parallel=spread.mesh.tensor,
            kernels=kernels,
            ranks_per_node=spread.ranks_per_node,
            spread=spread,
            place=place,
        )

    @property
    def plan(self) -> Plan:
        """Plan of the stage's part."""
        return self.spread.plan(self.place)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that one rank has."""
        return self.spread.tokens

    @property
    def norms_cut(self) -> int:
        """Ranks that share norms and sums of blocks."""
        return self.spread.mesh.tensor if self.spread.sequence_parallel else 1

    @cached_property
    def _shards(self) -> GroupSpan:
        return self.spread.shards

    @property
    def data_parallel(self) -> int:
        """Ranks that share the states of a part."""
        return self._shards.size

    @property
    def local(self) -> int:
        """How many of them are on one node."""
        return self._shards.local

    @property
    def nodes(self) -> int:
        """Number of nodes that they are on."""
        return self._shards.nodes

    @property
    def footprint(self) -> Footprint:
        """Footprint of the transport."""
        return self.spread.footprint

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Of one step; under a pipeline those in which shards are exchanged."""
        if self.spread.mesh.pipeline == 1:
            return super().passes
        return Pass(False, False, 1), Pass(True, True, 1)


class StageNetwork(Network):
    """Seconds of the collectives of one stage."""

    def __init__(self, job: StageJob) -> None:
        super().__init__(job)
        self._spread = job.spread

    def _gather_of(self, unit: UnitSpec) -> Cost:
        """The gather for forward; with a second shard the mean over micro-batches, of which one is far."""
        far = super()._gather_of(unit)
        if not self._spread.secondary:
            return far
        times = self._spread.accumulation
        return (far + Cost(self._in_node_s(unit)) * (times - 1)) * (1 / times)

    def _gather_again_of(self, unit: UnitSpec) -> Cost:
        """The gather for backward: none where units are held, in the node with a second shard."""
        if self._spread.holds_units:
            return NOTHING
        near = self._spread.secondary
        return Cost(self._in_node_s(unit)) if near else super()._gather_of(unit)

    def _in_node_s(self, unit: UnitSpec) -> float:
        whole = unit.layout.padded_numel * self._item
        return self._inside_s(whole // self._local, self._local, shared=True)


class StageTime:
    """Seconds of one stage, of one micro-batch where not said otherwise."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.spread = job.spread
        self._part = job.spread.part(job.place)

    @cached_property
    def forward_s(self) -> float:
        """Blocks, and the head where it is."""
        head = head_s(self.job, False) if self._part.last else 0.0
        return self._part.blocks * self._block[0] + head

    @cached_property
    def backward_s(self) -> float:
        """The same in backward, with what is computed again."""
        again = self._block[0] if self.spread.checkpointing else 0.0
        head = head_s(self.job, True) if self._part.last else 0.0
        if self._part.first and not self._part.last:  # the table's gradient into the flat buffer
            table = max((each.local_numel for each in self._part.placements[:1]), default=0)
            head += 2 * table * self.job.work.element_s("copy", backward=False)
        return self._part.blocks * (self._block[1] + again) + head

    @cached_property
    def _block(self) -> tuple[float, float]:
        return block_s(self.job, False), block_s(self.job, True)

    @property
    def adding_s(self) -> float:
        """Of a step: gradients that are added to those that wait instead of being copied."""
        copied, added = (self.job.work.element_s(kind, backward=False) for kind in ("copy", "add"))
        return (self.spread.accumulation - 1) * self.job.plan.numel * max(added - copied, 0.0)

    @property
    def turn_s(self) -> float:
        """One forward and one backward with all that they wait for."""
        computing = self.forward_s + self.backward_s
        return computing + self.sums_s + self.context_s + self.messages_s

    @cached_property
    def sums_s(self) -> float:
        """Sums of tensor ranks, forward and backward."""
        span = self.spread.span(self.job.place, "tensor")
        sums = (SUMS + 2 * self.spread.checkpointing) * self._part.blocks
        sums += self._part.first + self._part.last
        nbytes = self.spread.tokens * self.spread.model.hidden * self.spread.itemsize
        return 2 * sums * self._blocks_s(span, nbytes / span.size, ring=True)

    @cached_property
    def context_s(self) -> float:
        """Exchanges of attention, forward and backward."""
        span = self.spread.span(self.job.place, "sequence")
        numel = self.spread.tokens * self.spread.model.hidden // self.spread.mesh.tensor
        times = (EXCHANGES + EXCHANGES // 2 * self.spread.checkpointing) * self._part.blocks
        return times * self._blocks_s(span, numel / span.size * self.spread.itemsize)

    @cached_property
    def messages_s(self) -> float:
        """Outputs on their way to the next stage, gradients to the one before."""
        sends, receives = self.spread.messages(self.job.place)
        nbytes = self.spread.held(self.job.place).output_nbytes
        return (sends + receives) * self._blocks_s(self.spread.span(0, "pipeline"), nbytes, times=1)

    @cached_property
    def exchanged(self) -> Exchanged:
        """Of a step: the exchange of shards."""
        sums = (self.sums_s + self.context_s) / (3 * max(self._part.blocks, 1))
        again = self._block[0] if self.spread.checkpointing else 0.0
        forward, backward = self._block[0] + sums, self._block[1] + again + 2 * sums
        head = head_s(self.job, True) if self._part.last else 0.0
        return StageNetwork(self.job).exchanged(forward, backward, head)

    @cached_property
    def replicas(self) -> Cost:
        """Of a step: shards summed over replicas, unit by unit."""
        span, plan = self.spread.span(self.job.place, "replicate"), self.job.plan
        if span.size == 1:
            return NOTHING
        machine, local, sums = self.job.machine, span.local, plan.node_itemsize
        wished = self.job.footprint.round_nbytes
        between = RailTimes(machine, span.nodes, local, wished, spans=local == 1)
        costs = []
        for shard, units in Counter(u.layout.shard_numel for u in plan.trainable_units).items():
            # reduced in the dtype of partial sums, gathered in fp32
            part = -(-shard // span.size)
            moved = span.nodes * part * (sums + FP32_BYTES)
            inside = (local - 1) * (2 * machine.node_latency + moved / machine.node_rate)
            over = between.reduce(part, sums, sums) + between.gather(part * FP32_BYTES)
            costs.append((over + Cost(inside)) * units)
        return Cost.of_all(costs)

    @cached_property
    def replicas_s(self) -> float:
        """Of a step: ``replicas``, and tied weights summed over the two stages that hold them."""
        seconds, plan = self.replicas.seconds, self.job.plan
        tied = {each.name for each in self._part.placements if each.tied}
        held = [unit for unit in plan.units if tied & {slot.name for slot in unit.layout.slots}]
        shard = sum(unit.layout.shard_numel for unit in held)
        if held:
            stages = self.spread.span(0, "pipeline")
            seconds += self._blocks_s(stages, shard * FP32_BYTES, times=1)
        return seconds

    @property
    def update_s(self) -> float:
        """Of a step: norm of the gradient, optimizer."""
        plan = self.job.plan
        return seconds_of_update(self.job, sum(owned_numel(self.job, unit) for unit in plan.units))

    def _blocks_s(
        self, span: GroupSpan, nbytes: float, *, times: int | None = None, ring: bool = False
    ) -> float:
        """Seconds in which a rank sends a block to each other one of its group, as far as they are on other nodes.

        Args:
            span: the group.
            nbytes: of a block.
            times: number of blocks; None: one to each other rank.
            ring: whether ranks of several nodes pass blocks on in one ring, which crosses by one NIC.
        """
        machine = self.job.machine
        blocks = span.size - 1 if times is None else times
        if span.nodes == 1:
            return blocks * (machine.node_latency + nbytes / machine.node_rate)
        each = machine.nic_latency + machine.message_host
        if ring:
            return blocks * (each + nbytes / machine.nic_rate)
        far = blocks if times is not None else span.size - span.local
        seconds = far * (each + nbytes / machine.rail_rate)
        return seconds + (blocks - far) * (machine.node_latency + nbytes / machine.node_rate)
