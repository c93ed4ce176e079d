"""What is said of a folder on Lustre: over how many storage targets a checkpoint there is spread.

Owns: the finding. Must not know: how it is found out (`hpczero.files.direct`), checkpoints, MPI.
"""

from __future__ import annotations

from pathlib import Path

from hpczero.doctor.finding import Finding, Status
from hpczero.files.direct import ALL, Striping, command

MOST = 64  # from so many nodes on: all targets


def check_stripes(found: Striping | None, directory: Path, num_nodes: int) -> Finding | None:
    """Does one storage target take what all nodes write? None where the folder is not on Lustre.

    Args:
        found: layout of files in ``directory``.
        directory: where checkpoints will be.
        num_nodes: nodes of this job, which write one file together.
    """
    if found is None:
        return None
    targets = "all storage targets" if found.count == ALL else f"{found.count} storage target(s)"
    size = f", {found.size_nbytes / 2**20:g} MiB on each in turn" if found.size_nbytes else ""
    value = f"files in {directory} lie on {targets}{size}; {num_nodes} node(s) write a checkpoint"
    if found.count == ALL or found.count >= min(num_nodes, MOST):
        return Finding("stripes", value)
    wanted = ALL if num_nodes >= MOST else num_nodes
    return Finding(
        "stripes",
        value,
        Status.WARN,
        f"{command(directory, wanted)}, before the first checkpoint there, or --checkpoint.stripes {wanted}; files "
        "that are there stay as they are",
    )
