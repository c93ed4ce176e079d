"""How long a memory tier takes in a step, and how much of that computing hides.

Owns: the formulas of section 5 of ZeRO-Infinity as hpczero moves bytes. Must not know: how a tier works, how long the
model's own work takes. Assumptions beside those of `hpczero.predict.model`:

- reads and writes share the medium, so their times add up;
- weights are read ahead, so a pass takes as long as computing or its medium, whichever is longer; nothing is computed
  while the first unit comes, and nothing of a step while its first window comes;
- every byte that comes or goes is copied once between staging and where it is used, by the core that computes;
- what comes lies in memory that the kernel hands out anew, since what was used before was given back.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 4 and 6; issue 18.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.errors import ConfigError
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.plan.plan import FP32_BYTES
from hpczero.predict.job import Job


@dataclass(frozen=True)
class TierTimes:
    """Seconds of the medium in one step.

    Attributes:
        exposed: that nothing hides.
        whole: all of it.
    """

    exposed: float = 0.0
    whole: float = 0.0


def tier_times(job: Job, forward_s: float, backward_s: float, update_s: float) -> TierTimes:
    """What a job's tier adds to its step.

    Args:
        job: with what rests elsewhere.
        forward_s: of all micro-batches.
        backward_s: the same, with the communication that nothing hides.
        update_s: of the optimizer.
    """
    if not job.offload.any:
        return TierTimes()
    plan = OffloadedPlan(job.plan, job.offload)
    read, write, copy = _rates(job)
    sizes = [unit.layout.shard_numel for unit in plan.away]
    numel, steps = sum(sizes), job.accumulation
    first_unit = max(sizes, default=0) / max(numel, 1)
    exposed = whole = 0.0
    for backward in (False, True):
        computing = (backward_s if backward else forward_s) / steps
        for step in range(steps):
            came = numel * plan.pass_nbytes
            went = numel * FP32_BYTES * plan.gradients * (backward and step == steps - 1)
            medium, handled = came / read + went / write, (came + went) / copy
            if job.machine.fresh_rate:
                handled += came / job.machine.fresh_rate
            exposed += handled + _not_hidden(medium, computing + handled, first_unit)
            whole += medium
    moved = plan.traffic(micro_steps=0, synced=0)
    medium = moved.read_nbytes / read + moved.written_nbytes / write
    first_window = min(job.offload.window / max(plan.nbytes, 1), 1.0)
    return TierTimes(exposed + _not_hidden(medium, update_s, first_window), whole + medium)


def _not_hidden(medium_s: float, computing_s: float, first: float) -> float:
    """Seconds of the medium that computing does not hide; nothing hides the ``first`` share of it."""
    together = max(medium_s, computing_s) + first * min(medium_s, computing_s)
    return together - computing_s


def _rates(job: Job) -> tuple[float, float, float]:
    """Bytes per second of one rank: read, written, and copied to or from staging."""
    machine = job.machine
    copy = machine.memory_rate / 2  # a byte is read and written
    read, write = machine.tier_rates(job.offload.medium)
    if not read or not write:
        raise ConfigError(
            f"{machine.name}: has no rates of a tier on {job.offload.medium}, expected "
            f"{job.offload.medium}_read and {job.offload.medium}_write in bytes per second of a rank"
        )
    return read, write, copy
