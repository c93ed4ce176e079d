"""How long a training step will take: compute by a roofline, collectives by their formulas, bytes by the Plan.

Owns: the assumptions, the model's own work, the sum. Must not know: torch, MPI, where a machine's numbers come from,
how collectives work (`hpczero.predict.network`), how a prediction is shown.

    step = forward + backward + communication that they do not hide + update + what nothing hides of a memory tier

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
- ``model_parallel`` > 1 is that of the ZeRO paper, for its runs; `hpczero.predict.layout` has hpczero's own.

Source of the formulas: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), sec. 4, per level; Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3, for model parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig, flops_per_token
from hpczero.plan.layout import UnitSpec
from hpczero.plan.offload import Offload
from hpczero.plan.offloaded import OffloadedPlan, TierTraffic
from hpczero.plan.precision import Precision
from hpczero.predict.job import Job, Pass, plan_of
from hpczero.predict.job import update_s as seconds_of_update
from hpczero.predict.machine import Kernels, Machine
from hpczero.predict.network import Network

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
# Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 4 and 6; issue 18.

NOTHING = TierTraffic()
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
    step: TierTraffic = NOTHING
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
    if not job.offload.any and not job.inputs_nbytes:
        return TierTimes()
    moved, steps, found = _moved(job), job.accumulation, TierTimes()
    for one in job.passes:
        computing = (backward_s if one.backward else forward_s) / steps
        found += _pass(job, moved, one, computing)
    return found + _step(job, moved, update_s) if job.offload.any else found


def _pass(job: Job, moved: Moved, one: Pass, computing: float) -> TierTimes:
    """Forwards or backwards that are alike, each of so many seconds of ``computing``."""
    machine, inputs = job.machine, job.inputs_nbytes
    reduced = moved.reduced * one.reduces
    handled = (moved.gathered + reduced + inputs) / _copy_rate(machine)
    handled += _started(job, moved) * ((moved.gathered > 0) + (reduced > 0))
    if machine.fresh_rate:
        kept = job.transport == "window" and job.local > 1
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


def _copy_rate(machine: Machine) -> float:
    """Bytes per second to or from staging: each is read and written."""
    return machine.memory_rate / 2


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
def _moved_of(
    model: GPTConfig, cut: int, ranks: int, stage: int, precision: str, offload: Offload
) -> Moved:
    plan = plan_of(model, cut, ranks, stage, Precision.of(precision))
    return moved_of(OffloadedPlan(plan, offload))


def _moved(job: Job) -> Moved:
    return _moved_of(
        job.model, job.model_parallel, job.data_parallel, job.stage, job.precision, job.offload
    )


FORWARD_CALLS, BACKWARD_CALLS = 16, 24  # operations of a block that are started one by one


@dataclass(frozen=True)
class Prediction:
    """One step, on every rank.

    Attributes:
        job: the job of the step.
        forward_s, backward_s: without any wait; recomputation is part of backward.
        communication_s: communication that nothing hides.
        hidden_s: communication behind forward and backward.
        update_s: norm of the gradient, optimizer.
        tier_s: of a memory tier, as far as nothing hides it.
        tier_hidden_s: of a memory tier behind forward, backward and update.
        host_s: of communication, exposed and hidden, what the host of a rank spends on messages and launches.
        messages: between nodes that one rank sends.
        launches: of sums on a device, by one rank.
    """

    job: Job
    forward_s: float
    backward_s: float
    communication_s: float
    hidden_s: float
    update_s: float
    tier_s: float = 0.0
    tier_hidden_s: float = 0.0
    host_s: float = 0.0
    messages: int = 0
    launches: int = 0

    @property
    def step_s(self) -> float:
        """The whole step."""
        computing = self.forward_s + self.backward_s + self.update_s
        return computing + self.communication_s + self.tier_s

    @property
    def computing_s(self) -> float:
        """Forward and backward, without any wait."""
        return self.forward_s + self.backward_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        job = self.job
        return job.tokens * job.accumulation * job.data_parallel / self.step_s

    @property
    def tflops(self) -> float:
        """Model FLOP/s of one rank in 1e12; recomputation does not count."""
        return self.tokens_per_s * flops_per_token(self.job.model) / self.job.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak that the model FLOPs reach."""
        return self.tflops * 1e12 / self.job.machine.peak_of(self.job.precision)


def predict(job: Job, *, network: Network | None = None) -> Prediction:
    """Predict one step of ``job``.

    Args:
        job: what is trained, on which machine.
        network: how its collectives are charged; None: as hpczero does them.
    """
    network = network or Network(job)
    block_f, block_b = (block_s(job, backward) for backward in (False, True))
    head_f, head_b = (head_s(job, backward) for backward in (False, True))
    sliced_f, sliced_b = network.model_parallel_s()
    block_f += sliced_f
    block_b += sliced_b + (block_f if job.checkpointing else 0.0)
    layers, steps = job.model.layers, job.accumulation
    exchanged = network.exchanged(block_f, block_b, head_b)
    exposed = exchanged.exposed_s
    owned = sum(owned_numel(job, unit) for unit in job.plan.units)
    forward_s = steps * (layers * block_f + head_f)
    backward_s = steps * (layers * block_b + head_b)
    # After the first forward of a step, gradients are added to those that wait instead of being copied.
    copied, added = (job.work.element_s(kind, backward=False) for kind in ("copy", "add"))
    backward_s += (steps - 1) * job.plan.numel * max(added - copied, 0.0)
    update_s = seconds_of_update(job, owned)
    tier = tier_times(job, forward_s, backward_s + exposed, update_s)
    return Prediction(
        job=job,
        forward_s=forward_s,
        backward_s=backward_s,
        communication_s=exposed,
        hidden_s=exchanged.hidden_s,
        update_s=update_s,
        tier_s=tier.exposed,
        tier_hidden_s=max(tier.whole - tier.exposed, 0.0),
        host_s=exchanged.cost.host_s,
        messages=round(exchanged.cost.messages),
        launches=round(exchanged.cost.launches),
    )


def block_s(job: Job, backward: bool) -> float:
    """Seconds of one block: its products, attention, memory-bound passes, and the start of each operation."""
    work, tokens, model = job.work, job.tokens, job.model
    hidden, ffn, cut = model.hidden, model.ffn_multiple * model.hidden, job.model_parallel
    whole = hidden // job.norms_cut
    products = [
        (tokens, hidden, 3 * hidden // cut),
        (tokens, hidden // cut, hidden),
        (tokens, hidden, ffn // cut),
        (tokens, ffn // cut, hidden),
    ]
    seconds = _products_s(work, products, backward)
    seconds += work.attention_s(tokens, model.context, hidden // cut, backward=backward)
    numel = {
        "norm": 2 * whole,
        "gelu": ffn // cut,
        "add": 2 * whole,
        "fork": 2 * whole,
        "bias": (3 * hidden + ffn) // cut + 2 * whole,
        "copy": (4 if backward else 1) * hidden // cut,  # heads back beside each other; q, k, v
    }
    if model.positions == "rotary":
        # q and k: four products and two sums of halves, put side by side; in backward as much for each factor
        numel["copy"] += (16 if backward else 8) * hidden // cut
    for kind, per_token in numel.items():
        seconds += tokens * per_token * work.element_s(kind, backward=backward)
    if backward:  # gradients go into the flat buffer
        unit = next(unit for unit in job.plan.units if not unit.is_root)
        seconds += unit.layout.numel * _flat_copy_s(job)
    return seconds + (BACKWARD_CALLS if backward else FORWARD_CALLS) * work.dispatch_s


def head_s(job: Job, backward: bool) -> float:
    """Seconds of embedding, final norm, head and loss. The loss is computed once more in backward."""
    work, tokens, model = job.work, job.tokens, job.model
    vocab = model.vocab_size // job.model_parallel
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


def largest_micro_batch(job: Job) -> tuple[int, bool]:
    """(sequences, whether activations must be checkpointed) of the largest forward that fits; 0 if none does.

    It is without checkpointing if at least one sequence fits so, because to recompute costs a third.
    """
    found = job.fit
    if found.micro_batch and not job.checkpointing:
        return found.micro_batch, False
    return found.micro_batch_checkpointed, True
