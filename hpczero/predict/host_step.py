"""How long an update takes of which the host takes a part, and which part lets both sides end together.

Owns: the two sides of an update on a machine. Must not know: how a tier works, how a part becomes units. Where a host
beside a device is not known, whoever computes takes the whole update.

Source: Ren et al., ZeRO-Offload, ATC21, sec. 4; `hpczero.plan.offloaded`.
"""

from __future__ import annotations

from hpczero.plan.offloaded import Sides
from hpczero.predict.job import Job
from hpczero.predict.machine import Kernels, Machine


def sides_of(machine: Machine, work: Kernels, *, up: float) -> Sides | None:
    """What an update costs on either side. Gradients come down behind backward, so they cost nothing here.

    Args:
        machine: with its host; None is the answer where that is not known.
        work: kernels of the device.
        up: bytes of an element that go back to the device.
    """
    down_rate, up_rate = machine.host_write, machine.host_read
    if not (machine.host_update and down_rate and up_rate):
        return None
    on_device = 1 / work.update_s(1)
    return Sides(machine.host_update, on_device, 0.0, up, down_rate, up_rate)


def balance_of(machine: Machine, work: Kernels, *, up: float) -> float | None:
    """The fraction of all elements with which host and device end their updates together; None: no such host is known.

    Args:
        machine: with its host.
        work: kernels of the device.
        up: bytes of an element that go back to the device.
    """
    sides = sides_of(machine, work, up=up)
    return None if sides is None else sides.balance


def update_s(job: Job, owned: int) -> float:
    """Seconds of the norm and the optimizer, ways to and from a tier left out.

    Args:
        job: with what rests elsewhere, and who steps on it.
        owned: elements of which a rank has the optimizer's state.
    """
    sides = sides_of(job.machine, job.work, up=0.0) if job.offload.on_host else None
    if sides is None or not owned:
        return job.work.update_s(owned)
    away = sum(unit.layout.shard_numel for unit in job.offloaded.away)
    return sides.step_s(owned, away / owned)
