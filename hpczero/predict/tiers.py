"""How long a memory tier takes in a step, and how much of that computing hides.

Owns: the formulas of section 5 of ZeRO-Infinity as hpczero moves bytes. Must not know: how a tier works, how long the
model's own work takes. Assumptions beside those of `hpczero.predict.model`:

- reads and writes share the medium, so their times add up; two media work beside each other;
- weights are read ahead, so a pass takes as long as computing or its medium, whichever is longer; nothing is computed
  while the first unit comes, and nothing of a step while its first window comes, if all units rest elsewhere; units
  that stay are stepped on meanwhile;
- inputs of checkpointed blocks are written behind forward and read ahead of backward, all but the newest, which stays;
- every byte that comes or goes is copied once between staging and where it is used, by the core that computes;
- every window that comes or goes takes as long as some small operations of whoever computes, which starts it;
- what comes lies in memory that the kernel hands out anew, since what was used before was given back, unless ranks of
  a node share it and keep its pages; mean gradients on their way out lie in new memory always.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 4 and 6; issue 18.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from hpczero.plan.offload import Offload
from hpczero.plan.offloaded import OffloadedPlan, TierTraffic
from hpczero.plan.precision import Precision
from hpczero.predict.job import Job, Pass, plan_of
from hpczero.predict.machine import Machine

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
