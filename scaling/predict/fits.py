"""Which micro-batch of a job fits the memory of its machine's ranks, by the plan."""

from __future__ import annotations

from hpczero.plan.sizing import Fit, MachineSizes, fit
from hpczero.predict.job import Job


def fit_of(job: Job) -> Fit:
    """Bytes and the largest micro-batch of one forward a step."""
    room = MachineSizes(
        job.ranks,
        job.machine.usable,
        local_size=job.shards.local,
        transport=job.transport,
        on_device=job.on_device,
    )
    return fit(job.model, job.plan, room, sequence=job.length, micro_batch=job.micro_batch)


def needed_nbytes(job: Job) -> int:
    """Bytes of a rank: states, buffers and activations, which are checkpointed if and only if the job says so."""
    return fit_of(job).memory.total + job.held(0).peak_nbytes()


def largest_micro_batch(job: Job) -> tuple[int, bool]:
    """(sequences, whether activations must be checkpointed) of the largest forward that fits; 0 if none does.

    It is without checkpointing if at least one sequence fits so, because to recompute costs a third.
    """
    found = fit_of(job)
    if found.micro_batch and not job.checkpointing:
        return found.micro_batch, False
    return found.micro_batch_checkpointed, True
