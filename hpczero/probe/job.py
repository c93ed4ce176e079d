"""The probe of a job: its kernels, links and tiers, as one rank of it will find them while all others work too.

Owns: what is asked of a job. Must not know: how a piece is measured, what is done with the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.probe.measured import Measured
from hpczero.probe.tiers import Speed, measure_disk, measure_host

if TYPE_CHECKING:
    import torch

    from hpczero.accelerator import Accelerator
    from hpczero.job.topology import Topology


def probe_job(
    topology: Topology,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> tuple[Measured, list[str]]:
    """What the ranks measure together, and what could not be measured. Collective over world; equal on every rank.

    Args:
        topology: the ranks; all of them take part.
        accelerator: device of this rank.
        dtype: of parameters and activations.
        folder: on a disk of each node, for the disk tier; None: none. One that cannot be used is no error.
    """
    from hpczero.probe.kernels import host_update_s, measure_kernels

    with topology.agreed("probe what this host computes"):
        mine = measure_kernels(topology, accelerator=accelerator, dtype=dtype)
    troubles: list[str] = []

    def note(medium: str, speeds: list[Speed]) -> None:
        errors = [speed.error for speed in speeds if speed.error]
        troubles.extend(f"no tier on {medium}: {error}" for error in errors[:1])
        if not errors:
            own = speeds[topology.rank]
            mine[f"{medium}_read"], mine[f"{medium}_write"] = own.read, own.write

    if folder is not None:
        note("disk", measure_disk(topology.world, folder))
    if not accelerator.is_host:
        note("host", measure_host(topology.world, accelerator))
        mine["host_update"] = host_update_s(topology)
    found = [json.loads(text) for text in topology.world.gather_text(json.dumps(mine))]
    return Measured.of_ranks(found), troubles
