"""Environment variables that make a run slow or wrong without a word.

Owns: the table of traps; binding is not among them because `launch` measures it. Must not know: MPI, torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpczero.doctor.finding import Finding, Status
from hpczero.errors import ConfigError
from hpczero.options.environment import ALLOCATOR_VARIABLES, Environment


@dataclass(frozen=True)
class Trap:
    """A variable whose value, when ``pattern`` matches all of it (case ignored), has a bad ``effect``."""

    name: str
    pattern: str
    effect: str
    remedy: str


_UNSET = "unset it"
TRAPS = (
    Trap(
        "OMPI_MCA_btl_vader_single_copy_mechanism",
        "none",
        "ranks of one node copy every message twice",
        f"{_UNSET}; in a container allow process_vm_readv (--cap-add=SYS_PTRACE) instead",
    ),
    Trap(
        "OMPI_MCA_btl",
        r"(?!.*(\^|vader|sm\b)).*tcp.*",
        "ranks of one node talk over TCP",
        "add vader (Open MPI 4) or sm (Open MPI 5), or unset it",
    ),
    Trap(
        "OMPI_MCA_btl",
        r"\^.*\b(vader|sm)\b.*",
        "ranks of one node do not use shared memory",
        _UNSET,
    ),
    Trap(
        "UCX_TLS",
        r"(tcp|self|,)+",
        "messages use TCP only",
        f"{_UNSET}, so that UCX picks the fabric",
    ),
    Trap(
        "FI_PROVIDER",
        "(tcp|sockets)",
        "messages use TCP only",
        f"{_UNSET}, or name the fabric's provider",
    ),
    Trap("I_MPI_FABRICS", "(shm:)?tcp", "messages use TCP only", "set it to shm:ofi"),
    Trap(
        "MV2_ENABLE_AFFINITY",
        "1",
        "all OpenMP threads of a rank share one core",
        "export MV2_ENABLE_AFFINITY=0 when OMP_NUM_THREADS is above 1",
    ),
    Trap(
        "GOMP_CPU_AFFINITY",
        ".+",
        "threads of all ranks pile up on the cores it lists",
        f"{_UNSET} and let the launcher bind",
    ),
    Trap(
        "KMP_AFFINITY",
        ".*(explicit|proclist).*",
        "threads of all ranks pile up on the cores it lists",
        f"{_UNSET} and let the launcher bind",
    ),
    Trap("CUDA_LAUNCH_BLOCKING", "1", "every kernel launch waits for the device", _UNSET),
    *(
        Trap(
            name,
            ".*expandable_segments:true.*",
            "device memory cannot be shared between the ranks of a node",
            "remove expandable_segments:True from it",
        )
        for name in ALLOCATOR_VARIABLES
    ),
    Trap(
        "HPCZERO_STRICT",
        "1",
        "every collective is checked by another one first",
        f"{_UNSET} when not debugging",
    ),
)


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """One finding for each trap that is set and for a value of ours that cannot be used, or a single good one."""
    try:
        Environment.read(environment)
        found = []
    except ConfigError as error:
        found = [
            Finding("environment", str(error), Status.FAIL, "correct the variable or unset it")
        ]
    found += [
        Finding("environment", f"{t.name}={environment[t.name]}: {t.effect}", Status.WARN, t.remedy)
        for t in TRAPS
        if re.fullmatch(t.pattern, environment.get(t.name, ""), re.IGNORECASE)
    ]
    return found or [Finding("environment", "no variable that is known to slow a run down")]
