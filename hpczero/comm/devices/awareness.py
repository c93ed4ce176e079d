"""Whether this MPI can be given addresses of device memory.

Owns: the questions, their order, and the reason of the answer. Must not know: transports, units.

No single question can be trusted: libraries claim support that crashes, and deny support that works. The user's word
comes first. Then the library is asked. If it claims support, two ranks try it in a job of their own, because the
failure is a signal and not an exception. Without a proof everything goes through the host, which is always right.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from mpi4py import MPI

from hpczero.accelerator import Accelerator
from hpczero.comm.devices.access import DirectReach, HostReach, Reach, StagedReach
from hpczero.job.group import Group
from hpczero.options.environment import Environment

logger = logging.getLogger("hpczero.comm")

TRIAL_S = 60.0
TRIAL = "hpczero.comm.devices.trial"


@dataclass(frozen=True)
class Claim:
    """What an MPI library says of itself.

    Attributes:
        aware: whether it takes device memory; None if it does not say.
        reason: how we know, in words.
    """

    aware: bool | None
    reason: str


def reach_of(accelerator: Accelerator, group: Group) -> Reach:
    """How MPI gets at the memory of ``accelerator``. Collective over the group. Rank 0 decides for all."""
    if accelerator.is_host:
        return HostReach()
    text = ""
    with group.agreed("find out whether MPI takes device memory"):
        if group.is_root:
            aware, reason = decide(Environment.read().gpu_aware, claim(), tried_once)
            text = f"{int(aware)} {reason}"
    flag, _, reason = group.broadcast_text(text).partition(" ")
    reach: Reach = DirectReach(accelerator) if flag == "1" else StagedReach(accelerator)
    if group.is_root:
        logger.info("%s: %s", reach.name, reason)
    return reach


def decide(
    wish: bool | None, said: Claim, trial: Callable[[], tuple[bool, str]]
) -> tuple[bool, str]:
    """Answer the questions in order; also says why. Not collective.

    Args:
        wish: HPCZERO_GPU_AWARE.
        said: what the library claims.
        trial: called only if the library claims support.
    """
    if wish is not None:
        return wish, f"HPCZERO_GPU_AWARE={int(wish)}"
    if not said.aware:
        return False, f"{said.reason}; HPCZERO_GPU_AWARE=1 overrides"
    works, result = trial()
    return works, f"{said.reason}, and {result}"


def claim() -> Claim:
    """Ask the library, first by the standard's question, then by its makers' own. Not collective."""
    kinds = _memory_kinds()
    if kinds:
        return Claim("cuda" in kinds, f"MPI says it takes memory of kinds {kinds}")
    support = _query_cuda_support()
    if support is not None:
        return Claim(support, f"MPIX_Query_cuda_support says {int(support)}")
    return environment_claim(os.environ, _loaded_libraries())


def environment_claim(variables: Mapping[str, str], libraries: str) -> Claim:
    """What environment variables and loaded libraries tell of MPICH, MVAPICH and their relatives.

    Args:
        variables: the environment.
        libraries: text of /proc/self/maps.
    """
    if "libmpi_gtl_cuda" in libraries:
        on = variables.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
        return Claim(on, f"libmpi_gtl_cuda is loaded and MPICH_GPU_SUPPORT_ENABLED is {int(on)}")
    for name in ("MV2_USE_CUDA", "PSP_CUDA", "I_MPI_OFFLOAD"):
        if variables.get(name, "0") not in ("", "0"):
            return Claim(True, f"{name}={variables[name]}")
    return Claim(None, "nothing says that this MPI takes device memory")


@cache
def tried_once() -> tuple[bool, str]:
    """``try_in_a_job``, at most once in a process."""
    return try_in_a_job()


def try_in_a_job() -> tuple[bool, str]:
    """Send device memory between two ranks started for it. Not collective; takes seconds.

    Returns:
        Whether it worked, and what to say of it.
    """
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if launcher is None:
        return False, "no mpirun to try it with; HPCZERO_GPU_AWARE=1 if you know that it works"
    # A job of its own: what the launcher of this one has left in the environment is not for it.
    ours = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_", "SLURM_")
    kept = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(kept) or not name.startswith(ours)
    }
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # one core will do
    command = [launcher, "-n", "2", sys.executable, "-m", TRIAL]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"two ranks were still trying after {TRIAL_S:.0f} s"
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip(" -")]
        return (
            False,
            f"two ranks failed when they tried ({done.returncode}: {' '.join(words)[:200]})",
        )
    return True, "two ranks have tried it"


def _memory_kinds() -> str:
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    finally:
        info.Free()


def _query_cuda_support() -> bool | None:
    """Open MPI's own question; None if it has no such function."""
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


def _loaded_libraries() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
