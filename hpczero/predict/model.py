"""How long a training step will take: compute by a roofline, collectives by their formulas, bytes by the Plan.

    step = m x slowest stage + fill of the pipeline + exchange of shards that nothing hides + replicas + ties + update
           + what nothing hides of a memory tier

Assumptions, all of them:

- every rank is as fast as every other, and the network has no other traffic: noise and stragglers are not in the model;
- a block's work is its matrix products, its attention and its memory-bound passes, one after the other; causal
  attention is counted whole, as in the FLOP count; by data sheet, large products reach one share of the peak, and
  passes the full rate of memory (`hpczero.predict.machine`);
- all-gather: pairwise between nodes, then inside the node; reduce-scatter: first inside, then pairwise between nodes;
  all ranks of a node share its NICs. Rounds, steps and messages are the transport's own, and so is what they and the
  launches of sums cost the host (`hpczero.predict.network`);
- with more than one node the next unit's all-gather and the last unit's reduction are hidden by one unit's compute, as
  in `hpczero.zero.schedule`; without, or over the flat transport, nothing is hidden. The host's time of a collective is
  part of it: a thread of its own spends it, so that it hides no more and no less;
- bytes and shards are those of `hpczero.plan`; checkpointed activations cost one more forward of each block;
- sums of tensor ranks, exchanges of attention and messages between stages are hidden by nothing;
- a sum over tensor ranks is a reduction and a gather, each of whose blocks is one message; several nodes make one ring;
- the fill of a pipeline is one micro-batch of every stage but the slowest, over the groups of blocks of each stage:
  with equal stages the bubble ``(p - 1) / (v m)``;
- under a pipeline units are gathered before the first forward and reduced in the last backward of each stage, and one
  micro-batch hides what it can of that;
- replicas sum each unit as the transport between nodes does (`hpczero.predict.network`); other messages that leave a
  node cost the host one message each, and inside a node the latency holds what they cost;
- each tensor rank sends the whole output of its stage to the next, with sequence parallelism its part.

Source of the formulas: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), sec. 4, per level; Narayanan et al., Megatron-LM on GPU clusters, arXiv 2104.04473, sec. 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hpczero.errors import ConfigError
from hpczero.models.config import flops_per_token
from hpczero.plan.degrees import GroupSpan
from hpczero.plan.layout import UnitSpec
from hpczero.plan.offloaded import OffloadedPlan, TierTraffic
from hpczero.plan.plan import FP32_BYTES
from hpczero.plan.sent import EXCHANGES, SUMS
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job, Pass
from hpczero.predict.job import update_s as seconds_of_update
from hpczero.predict.machine import Kernels, Machine
from hpczero.predict.network import NOTHING, Cost, Exchanged, Network, RailTimes

# How long a memory tier takes in a step, and how much of that computing hides.
#
# - reads and writes share the medium, so their times add up; two media work beside each other;
# - weights are read ahead, so a pass takes as long as computing or its medium, whichever is longer; nothing is computed
#   while the first unit comes, and nothing of a step while its first window comes, if all units rest elsewhere; units
#   that stay are stepped on meanwhile;
# - inputs of checkpointed blocks are written behind forward and read ahead of backward, all but the newest, which
#   stays;
# - every byte that comes or goes is copied once between staging and where it is used, by the core that computes;
# - every window that comes or goes takes as long as some small operations of whoever computes, which starts it;
# - what comes lies in memory that the kernel hands out anew, since what was used before was given back, unless ranks of
#   a node share it and keep its pages; mean gradients on their way out lie in new memory always.
#
# Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 4 and 6.

NOTHING_MOVED = TierTraffic()
# Small operations that a window costs whoever computes: it is asked for, waited for, cut into tensors, given back.
# Measured on one thread beside a disk: 0.5 to 1.4 ms where a small operation took 1.6 us.
WINDOW_OPERATIONS = 300


@dataclass(frozen=True)
class TierTimes:
    """Seconds of the medium in one step.

    Attributes:
        exposed: that nothing hides.
        whole: all of it.
    """

    exposed: float = 0.0
    whole: float = 0.0

    def __add__(self, other: TierTimes) -> TierTimes:
        return TierTimes(self.exposed + other.exposed, self.whole + other.whole)


@dataclass(frozen=True)
class Moved:
    """Bytes of shards that one rank moves, as `OffloadedPlan` counts them.

    Attributes:
        gathered: of parameters that come in one pass.
        reduced: of gradients that go where they are reduced.
        step: of the update.
        windows: through which all of a shard passes once.
        share: of the elements of its shards, how many have parts elsewhere; 0 to 1.
        first: of all that comes in a pass, how much does in the first unit.
    """

    gathered: int = 0
    reduced: int = 0
    step: TierTraffic = NOTHING_MOVED
    windows: int = 0
    share: float = 0.0
    first: float = 0.0


def moved_of(plan: OffloadedPlan) -> Moved:
    """What a plan moves."""
    if not plan.offload.any:
        return Moved()
    step = plan.traffic(micro_steps=0, synced=0)
    whole = plan.traffic(micro_steps=1, synced=1)
    sizes = [unit.layout.shard_numel for unit in plan.away]
    return Moved(
        gathered=(whole.read_nbytes - step.read_nbytes) // 2,  # forward and backward
        reduced=whole.written_nbytes - step.written_nbytes,
        step=step,
        windows=sum(
            -(-unit.layout.shard_numel * plan.element_nbytes // plan.offload.window)
            for unit in plan.away
        ),
        share=plan.share,
        first=max(sizes, default=0) / max(sum(sizes), 1),
    )


def tier_times(job: Job, forward_s: float, backward_s: float, update_s: float) -> TierTimes:
    """What a job's tiers add to its step.

    Args:
        job: with what rests elsewhere.
        forward_s: of all micro-batches.
        backward_s: the same, with the communication that nothing hides.
        update_s: of the optimizer.
    """
    if not job.offload.any and not job.inputs_away:
        return TierTimes()
    moved, steps, found = _moved(job), job.accumulation, TierTimes()
    for one in job.passes:
        computing = (backward_s if one.backward else forward_s) / steps
        found += _pass(job, moved, one, computing)
    return found + _step(job, moved, update_s) if job.offload.any else found


def _pass(job: Job, moved: Moved, one: Pass, computing: float) -> TierTimes:
    """Forwards or backwards that are alike, each of so many seconds of ``computing``."""
    machine, inputs = job.machine, job.inputs_away
    reduced = moved.reduced * one.reduces
    copied = machine.memory_rate / 2  # to or from staging: each byte is read and written
    handled = (moved.gathered + reduced + inputs) / copied
    handled += _started(job, moved) * ((moved.gathered > 0) + (reduced > 0))
    if machine.fresh_rate:
        kept = job.transport == "window" and job.shards.local > 1
        handled += (moved.gathered * (not kept) + reduced) / machine.fresh_rate
    shards = inward = 0.0
    if job.offload.any:
        read, write = _rates(machine, job.offload.medium)
        shards = moved.gathered / read + reduced / write
    if inputs:
        read, write = _rates(machine, job.kept.rest)
        inward = inputs / (read if one.backward else write)
    alike = job.offload.medium == job.kept.rest
    medium = shards + inward if alike else max(shards, inward)
    # Forward begins with units that stay, if there are any, and what comes later is read meanwhile.
    waits = one.backward or moved.share == 1
    first = moved.first * shards / medium if medium and waits else 0.0
    exposed = handled + _not_hidden(medium, computing + handled, first)
    return TierTimes(one.times * exposed, one.times * (shards + inward))


def _step(job: Job, moved: Moved, update_s: float) -> TierTimes:
    """The update, window by window."""
    read, write = _rates(job.machine, job.offload.medium)
    medium = moved.step.read_nbytes / read + moved.step.written_nbytes / write
    first = 0.0
    if moved.share == 1:
        first = min(job.offload.window / max(job.offloaded.nbytes, 1), 1.0)
    started = _started(job, moved)
    return TierTimes(started + _not_hidden(medium, update_s + started, first), medium)


def _started(job: Job, moved: Moved) -> float:
    """Seconds in which all windows of a shard are started once."""
    return moved.windows * WINDOW_OPERATIONS * job.work.dispatch_s


def _not_hidden(medium_s: float, computing_s: float, first: float) -> float:
    """Seconds of the medium that computing does not hide; nothing hides the ``first`` share of it."""
    together = max(medium_s, computing_s) + first * min(medium_s, computing_s)
    return together - computing_s


def _rates(machine: Machine, medium: str) -> tuple[float, float]:
    """Bytes per second of one rank: read and written."""
    read, write = machine.tier_rates(medium)
    if not read or not write:
        raise ConfigError(
            f"{machine.name}: has no rates of a tier on {medium}, expected {medium}_read and {medium}_write in bytes "
            "per second of a rank"
        )
    return read, write


@lru_cache(maxsize=4096)  # many jobs differ in their batch alone
def _moved_of(spread: Spread) -> Moved:
    return moved_of(spread.offloaded)


def _moved(job: Job) -> Moved:
    names = ("stage", "precision", "interleave", "offload", "place")
    alike = {name: getattr(job, name) for name in names}
    return _moved_of(Spread(job.model, job.mesh, job.mesh.size, **alike))


FORWARD_CALLS, BACKWARD_CALLS = 16, 24  # operations of a block that are started one by one


@dataclass(frozen=True)
class Prediction:
    """One step. Seconds of the slowest pipeline stage, where not said otherwise.

    Attributes:
        job: the job of the step.
        forward_s, backward_s: of all micro-batches, without any wait; recomputation is part of backward.
        sums_s: of tensor ranks, all micro-batches.
        context_s: of ranks that share tokens, all micro-batches.
        messages_s: to and from other stages, all micro-batches.
        fill_s: time in which the stage has nothing to do.
        communication_s: exchange of shards that nothing hides, and waits of ranks for each other.
        hidden_s: exchange of shards behind forward and backward.
        replicas_s: sums of reduced gradients over replicas, and of tied weights over stages.
        update_s: norm of the gradient, optimizer.
        tier_s: of a memory tier, as far as nothing hides it.
        tier_hidden_s: of a memory tier behind forward, backward and update.
        host_s: of the exchange of shards and of replicas, what the host of a rank spends on messages and launches.
        messages: of that exchange, between nodes, that one rank sends.
        launches: of sums on a device in that exchange, by one rank.
    """

    job: Job
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
    tier_s: float
    tier_hidden_s: float
    host_s: float
    messages: int
    launches: int

    @property
    def step_s(self) -> float:
        """The whole step."""
        computing = self.forward_s + self.backward_s + self.update_s + self.fill_s
        activations = self.sums_s + self.context_s + self.messages_s
        waits = self.communication_s + self.tier_s + self.replicas_s + activations
        return computing + waits + self.job.machine.step_host

    @property
    def computing_s(self) -> float:
        """Forward and backward, without any wait."""
        return self.forward_s + self.backward_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.job.global_batch * self.job.length / self.step_s

    @property
    def tflops(self) -> float:
        """Model FLOP/s of one rank in 1e12; recomputation does not count."""
        return self.tokens_per_s * flops_per_token(self.job.model) / self.job.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak that the model FLOPs reach."""
        return self.tflops * 1e12 / self.job.machine.peak_of(self.job.precision)


def predict(job: Job) -> Prediction:
    """Predict one step of ``job``.

    Args:
        job: what is trained, on which machine.

    Raises:
        ConfigError: the machine has no peak for the precision, or no rates of a tier that is used.
    """
    stages = [StageTime(replace(job, place=place)) for place in job.kinds]
    counts = list(job.kinds.values())
    slowest = max(stages, key=lambda stage: stage.turn_s)
    everybody = sum(n * stage.turn_s for n, stage in zip(counts, stages, strict=True))
    times = job.accumulation
    forward_s = times * slowest.forward_s
    backward_s = times * slowest.backward_s + slowest.adding_s
    exposed = max(stage.exchanged.exposed_s for stage in stages)
    waits = job.machine.imbalance * (job.ranks > 1)
    update_s = max(stage.update_s for stage in stages)
    tier = tier_times(slowest.job, forward_s, backward_s + exposed, update_s)
    costs = [(stage.exchanged.cost, stage.replicas) for stage in stages]
    return Prediction(
        job=job,
        forward_s=forward_s,
        backward_s=backward_s,
        sums_s=times * slowest.sums_s,
        context_s=times * slowest.context_s,
        messages_s=times * slowest.messages_s,
        fill_s=(everybody - slowest.turn_s) / job.interleave,
        communication_s=exposed + (forward_s + backward_s) * waits,
        hidden_s=max(stage.exchanged.hidden_s for stage in stages),
        replicas_s=max(stage.replicas_s for stage in stages),
        update_s=update_s,
        tier_s=tier.exposed,
        tier_hidden_s=max(tier.whole - tier.exposed, 0.0),
        host_s=max(shards.host_s + replicas.host_s for shards, replicas in costs),
        messages=round(max(shards.messages + replicas.messages for shards, replicas in costs)),
        launches=round(max(shards.launches + replicas.launches for shards, replicas in costs)),
    )


@dataclass(frozen=True)
class StepRange:
    """One step, predicted thrice: at the fast end of what sources say of its machine, as is likely, at the slow end."""

    fast: Prediction
    likely: Prediction
    slow: Prediction

    @classmethod
    def around(cls, likely: Prediction) -> StepRange:
        """The step at both ends; the same where its machine has no bounds."""
        job, machine = likely.job, likely.job.machine
        if not machine.bounds:
            return cls(likely, likely, likely)
        ends = (machine.at_end(slow=slow) for slow in (False, True))
        fast, slow = (predict(replace(job, machine=end)) for end in ends)
        return cls(fast, likely, slow)

    def overlaps(self, other: StepRange) -> bool:
        """Whether some step of the one takes as long as some of the other."""
        first, second = (self.fast, self.slow), (other.fast, other.slow)
        return first[0].step_s <= second[1].step_s and second[0].step_s <= first[1].step_s

    def slower(self, other: StepRange) -> bool:
        """Whether it is slower at both ends and likely so: what is not known of the machine is the same for both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(mine.step_s > others.step_s for mine, others in pairs)


class StageTime:
    """Seconds of one stage, of one micro-batch where not said otherwise."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._part = job.part(job.place)

    @cached_property
    def forward_s(self) -> float:
        """Blocks, and the head where it is."""
        head = head_s(self.job, False) if self._part.last else 0.0
        return self._part.blocks * self._block[0] + head

    @cached_property
    def backward_s(self) -> float:
        """The same in backward, with what is computed again."""
        head = head_s(self.job, True) if self._part.last else 0.0
        if self._part.first and not self._part.last:  # the table's gradient into the flat buffer
            table = max((each.local_numel for each in self._part.placements[:1]), default=0)
            head += 2 * table * self.job.work.element_s("copy", backward=False)
        return self._part.blocks * (self._block[1] + self._again) + head

    @cached_property
    def _again(self) -> float:
        """What backward computes of a block once more."""
        if not self.job.checkpointing:
            return 0.0
        return self._block[0] if self.job.again else block_s(self.job, False, products=False)

    @cached_property
    def _block(self) -> tuple[float, float]:
        return block_s(self.job, False), block_s(self.job, True)

    @property
    def adding_s(self) -> float:
        """Of a step: gradients that are added to those that wait instead of being copied."""
        copied, added = (self.job.work.element_s(kind, backward=False) for kind in ("copy", "add"))
        return (self.job.accumulation - 1) * self.job.plan.numel * max(added - copied, 0.0)

    @property
    def turn_s(self) -> float:
        """One forward and one backward with all that they wait for."""
        computing = self.forward_s + self.backward_s
        return computing + self.sums_s + self.context_s + self.messages_s

    @cached_property
    def sums_s(self) -> float:
        """Sums of tensor ranks, forward and backward."""
        span = self.job.span(self.job.place, "tensor")
        sums = (SUMS + 2 * self.job.again) * self._part.blocks
        sums += self._part.first + self._part.last
        nbytes = self.job.tokens * self.job.model.hidden * self.job.itemsize
        return 2 * sums * self._blocks_s(span, nbytes / span.size, ring=True)

    @cached_property
    def context_s(self) -> float:
        """Exchanges of attention, forward and backward."""
        span = self.job.span(self.job.place, "sequence")
        numel = self.job.tokens * self.job.model.hidden // self.job.mesh.tensor
        times = (EXCHANGES + EXCHANGES // 2 * self.job.again) * self._part.blocks
        return times * self._blocks_s(span, numel / span.size * self.job.itemsize)

    @cached_property
    def messages_s(self) -> float:
        """Outputs on their way to the next stage, gradients to the one before."""
        sends, receives = self.job.messages(self.job.place)
        nbytes = self.job.held(self.job.place).output_nbytes
        return (sends + receives) * self._blocks_s(self.job.span(0, "pipeline"), nbytes, times=1)

    @cached_property
    def exchanged(self) -> Exchanged:
        """Of a step: the exchange of shards."""
        sums = (self.sums_s + self.context_s) / (3 * max(self._part.blocks, 1))
        forward, backward = self._block[0] + sums, self._block[1] + self._again + 2 * sums
        head = head_s(self.job, True) if self._part.last else 0.0
        return Network(self.job).exchanged(forward, backward, head)

    @cached_property
    def replicas(self) -> Cost:
        """Of a step: shards summed over replicas, unit by unit."""
        span, plan = self.job.span(self.job.place, "replicate"), self.job.plan
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
            stages = self.job.span(0, "pipeline")
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


GATED_PASSES = 2.5  # of a GELU: those of a gate, and of its product with the values


def block_s(job: Job, backward: bool, *, products: bool = True) -> float:
    """Seconds of one block: its products, attention, memory-bound passes, and the start of each operation."""
    work, tokens, model = job.work, job.tokens, job.model
    hidden, cut = model.hidden, job.mesh.tensor
    query, read = model.query_width // cut, (model.query_width + 2 * model.key_width) // cut
    whole, wide = hidden // job.norms_cut, model.active * model.ffn_width // cut
    seconds = 0.0
    if products:
        seconds = _products_s(work, [(tokens, hidden, read), (tokens, query, hidden)], backward)
        seconds += _mlp_s(job, backward)
        seconds += work.attention_s(tokens, job.length, query, backward=backward)
    numel = {
        "norm": 2 * whole,
        "gelu": round(wide * (GATED_PASSES if model.gated else 1)),
        "add": 2 * whole,
        "fork": 2 * whole,
        "bias": 0 if model.gated else read + wide + 2 * whole,
        "copy": read + query if backward else query,  # heads back beside each other; q, k, v
    }
    if model.experts > 1:  # tokens in the order of experts, and back
        numel["copy"] += 2 * model.active * hidden
    if model.positions == "rotary":
        # q and k: four products and two sums of halves, put side by side; in backward as much for each factor
        numel["copy"] += (8 if backward else 4) * (model.query_width + model.key_width) // cut
    for kind, per_token in numel.items():
        seconds += tokens * per_token * work.element_s(kind, backward=backward)
    if backward:  # gradients go into the flat buffer
        unit = next(unit for unit in job.plan.units if not unit.is_root)
        seconds += unit.layout.numel * _flat_copy_s(job)
    return seconds + (BACKWARD_CALLS if backward else FORWARD_CALLS) * work.dispatch_s


def _mlp_s(job: Job, backward: bool) -> float:
    """Seconds of the MLP's products; of experts each has as many tokens."""
    work, model, tokens = job.work, job.model, job.tokens
    ffn, hidden = model.ffn_width // job.mesh.tensor, model.hidden
    mine = max(tokens * model.active // model.experts, 1)
    of_one = [(mine, hidden, (1 + model.gated) * ffn), (mine, ffn, hidden)]
    seconds = model.experts * _products_s(work, of_one, backward)
    if model.experts > 1:
        seconds += _products_s(work, [(tokens, hidden, model.experts)], backward)
    return seconds


def head_s(job: Job, backward: bool) -> float:
    """Seconds of embedding, final norm, head and loss. The loss is computed once more in backward."""
    work, tokens, model = job.work, job.tokens, job.model
    vocab = model.vocab_size // job.mesh.tensor
    seconds = _products_s(work, [(tokens, model.hidden, vocab)], backward)
    seconds += tokens * vocab * work.element_s("loss", backward=backward)
    seconds += tokens * model.hidden * work.element_s("norm", backward=backward)
    if backward:  # the embedding's gradient is as large as its table, and is added to the head's
        table = vocab * model.hidden
        seconds += 2 * table * work.element_s("copy", backward=False)
        seconds += job.plan.units[0].layout.numel * _flat_copy_s(job)
    return seconds


def _flat_copy_s(job: Job) -> float:
    """Seconds of one element of a gradient on its way into the flat buffer, which no cache holds."""
    in_memory = 2 * job.plan.precision.param_itemsize / job.machine.memory_rate
    return max(job.work.element_s("copy", backward=False), in_memory)


def _products_s(work: Kernels, products: list[tuple[int, int, int]], backward: bool) -> float:
    if not backward:
        return sum(work.matmul_s(m, k, n) for m, k, n in products)
    # dx = dy W^T and dW = x^T dy
    return sum(work.matmul_s(m, n, k) + work.matmul_s(k, m, n) for m, k, n in products)


def owned_numel(job: Job, unit: UnitSpec) -> int:
    """Elements of which this rank has the optimizer's state."""
    layout = unit.layout
    return layout.shard_numel if job.plan.stage.shards_optimizer else layout.padded_numel
