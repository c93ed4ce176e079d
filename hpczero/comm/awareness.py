"""Whether this MPI can be given addresses of device memory.

No single question can be trusted: libraries claim support that crashes, and deny support that works. The user's word
comes first. Then the library is asked. If it claims support, two ranks try it in a job of their own, because the
failure is a signal and not an exception. Without a proof everything goes through the host, which is always right.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpi4py import MPI

from hpczero.accelerator import Accelerator
from hpczero.comm.devices import DirectReach, HostReach, Reach, StagedReach
from hpczero.job.group import Group
from hpczero.options.environment import Environment

# The job of two ranks that tries whether MPI takes device memory.
#
# The trial goes the way the job itself came. mpirun starts both ranks on this node. A job of several nodes is started
# by srun or needs ssh, which may not be allowed; so only srun tries two nodes as well. Ranks of two nodes use the
# network's own path for device memory, which can fail where shared memory works.

TRIAL_S = 60.0
TRIAL = "hpczero.comm.trial"

# What a launcher leaves in the environment of its ranks is not for a job of their own ...
OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_", "SLURM_", "SRUN_")
# ... but what the user or the site has set is.
OF_USERS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
# By which srun finds the allocation, and the way its ranks find each other.
OF_ALLOCATION = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_MPI_TYPE")
# --overlap: this very step holds all that the job has been given. --overcommit: one core will do; --cpus-per-task would
# ask for cores of its own (--exact).
SRUN = ("--overlap", "--overcommit", "--ntasks=2", "--cpu-bind=none", "--immediate=30")


@cache
def tried_once() -> tuple[bool, str]:
    """``try_in_a_job``, at most once in a process."""
    return try_in_a_job(os.environ)


def try_in_a_job(variables: Mapping[str, str]) -> tuple[bool, str]:
    """Send device memory between two ranks started for it: whether it worked, and what to say of it.

    Not collective; takes seconds. ``variables`` are the environment of this process.
    """
    found = launchers(variables)
    if not found:
        return (
            False,
            "no mpirun or srun to try it with; HPCZERO_GPU_AWARE=1 if you know that it works",
        )
    environment = environment_of(variables, by_srun="srun" in found[0][0])
    for command in found:
        works, said = _tried([*command, sys.executable, "-m", TRIAL], environment)
        if not works:
            return False, said
    return True, "two ranks have tried it" + (" on one node, and two on two" if found[1:] else "")


def launchers(variables: Mapping[str, str]) -> list[list[str]]:
    """What comes before a command to start two ranks of it: one line, or with srun also one for two nodes.

    srun if it has started this job, or if it is all there is; else mpirun. Nothing where there is neither.
    """
    path = variables.get("PATH")
    mpirun = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    srun = shutil.which("srun", path=path) if variables.get("SLURM_JOB_ID") else None
    by_srun = Environment.read(variables).launched_by == "SLURM_STEP_NUM_TASKS"
    if srun is not None and (by_srun or mpirun is None):
        lines = [[srun, "--nodes=1", *SRUN]]
        if int(variables.get("SLURM_JOB_NUM_NODES") or 1) > 1:
            lines.append([srun, "--nodes=2", "--ntasks-per-node=1", *SRUN])
        return lines
    return [[mpirun, "-n", "2"]] if mpirun is not None else []


def environment_of(variables: Mapping[str, str], *, by_srun: bool) -> dict[str, str]:
    """The environment for a job of its own, started inside of a rank of this one."""
    kept = (*OF_USERS, *(OF_ALLOCATION if by_srun else ()))
    environment = {
        name: value
        for name, value in variables.items()
        if name.startswith(kept) or not name.startswith(OF_LAUNCHERS)
    }
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # one core will do
    return environment


def _tried(command: list[str], environment: Mapping[str, str]) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"two ranks were still trying after {TRIAL_S:.0f} s"
    if done.returncode == 0:
        return True, ""
    words = " ".join(line for line in done.stderr.splitlines() if line.strip(" -"))[:200]
    return False, f"two ranks failed when they tried ({done.returncode}: {words})"


logger = logging.getLogger("hpczero.comm")

# Open MPI, MPICH and its kin (libmpi, libmpich, libmpi_cray, libmpi_gnu_123, libmpi_abi) in a line of /proc/self/maps.
_MPI_LIBRARY = re.compile(r"(/\S*/libmpi(?:ch)?(?:_\w+)?\.so[\w.]*)$", re.MULTILINE)


@dataclass(frozen=True)
class LibraryClaim:
    """What an MPI library says of itself: whether it takes device memory (None: it does not say), and how we know."""

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
    wish: bool | None, said: LibraryClaim, trial: Callable[[], tuple[bool, str]]
) -> tuple[bool, str]:
    """Answer the questions in order; also says why. Not collective.

    ``wish`` is HPCZERO_GPU_AWARE, and ``said`` what the library claims. ``trial`` is called only if it claims support.
    """
    if wish is not None:
        return wish, f"HPCZERO_GPU_AWARE={int(wish)}"
    if not said.aware:
        return False, f"{said.reason}; HPCZERO_GPU_AWARE=1 overrides"
    works, result = trial()
    return works, f"{said.reason}, and {result}"


def claim() -> LibraryClaim:
    """Ask the library, first by the standard's question, then by its makers' own. Not collective."""
    libraries = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return claim_of(_memory_kinds(), query_cuda_support(libraries), os.environ, libraries)


def claim_of(
    kinds: str, support: bool | None, variables: Mapping[str, str], libraries: str
) -> LibraryClaim:
    """What all answers say together. A list of kinds without CUDA is no denial: see below.

    Args:
        kinds: MPI's ``mpi_memory_alloc_kinds``, such as ``system,mpi,cuda:device``; empty where it has none.
        support: what ``MPIX_Query_cuda_support`` says; None where there is no such function.
        variables: the environment.
        libraries: text of /proc/self/maps.
    """
    if "cuda" in [kind.strip().partition(":")[0] for kind in kinds.split(",")]:
        return LibraryClaim(True, f"MPI says it takes memory of kinds {kinds}")
    if support is not None:
        return LibraryClaim(support, f"MPIX_Query_cuda_support says {int(support)}")
    found = environment_claim(variables, libraries)
    if found.aware is None and kinds:
        # MPI 4.1 lets a library list the kinds that were asked for; MPICH with CUDA lists "mpi,system" unasked.
        return LibraryClaim(None, f"{found.reason}: its memory kinds are {kinds}")
    return found


def environment_claim(variables: Mapping[str, str], libraries: str) -> LibraryClaim:
    """What environment variables and loaded libraries tell of MPICH, MVAPICH and their relatives; as ``claim_of``."""
    if "libmpi_gtl_cuda" in libraries:
        on = variables.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
        return LibraryClaim(
            on, f"libmpi_gtl_cuda is loaded and MPICH_GPU_SUPPORT_ENABLED is {int(on)}"
        )
    for name in ("MV2_USE_CUDA", "PSP_CUDA", "I_MPI_OFFLOAD"):
        if variables.get(name, "0") not in ("", "0"):
            return LibraryClaim(True, f"{name}={variables[name]}")
    return LibraryClaim(None, "nothing says that this MPI takes device memory")


def _memory_kinds() -> str:
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    finally:
        info.Free()


def query_cuda_support(libraries: str) -> bool | None:
    """The makers' own question, ``MPIX_Query_cuda_support``; None if no MPI in this process has such a function.

    Each MPI library in ``libraries``, the text of /proc/self/maps, is asked by its file: its symbols are not global
    where Python has loaded it.
    """
    loaded = os.RTLD_NOW | os.RTLD_NOLOAD  # never one that is not here
    for path in [*dict.fromkeys(_MPI_LIBRARY.findall(libraries)), None]:
        try:
            query = getattr(ctypes.CDLL(path, mode=loaded), "MPIX_Query_cuda_support", None)
        except OSError:  # replaced on disk since it was loaded
            continue
        if query is not None:
            return bool(query())
    return None
