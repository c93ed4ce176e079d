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
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpi4py import MPI

from hpczero.accelerator import Accelerator
from hpczero.comm.devices.access import DirectReach, HostReach, Reach, StagedReach
from hpczero.comm.devices.trial_job import tried_once
from hpczero.job.group import Group
from hpczero.options.environment import Environment

logger = logging.getLogger("hpczero.comm")

# Open MPI, MPICH and its kin (libmpi, libmpich, libmpi_cray, libmpi_gnu_123, libmpi_abi) in a line of /proc/self/maps.
_MPI_LIBRARY = re.compile(r"(/\S*/libmpi(?:ch)?(?:_\w+)?\.so[\w.]*)$", re.MULTILINE)


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
    libraries = _loaded_libraries()
    return claim_of(_memory_kinds(), query_cuda_support(libraries), os.environ, libraries)


def claim_of(
    kinds: str, support: bool | None, variables: Mapping[str, str], libraries: str
) -> Claim:
    """What all answers say together. A list of kinds without CUDA is no denial: see below.

    Args:
        kinds: MPI's ``mpi_memory_alloc_kinds``, such as ``system,mpi,cuda:device``; empty where it has none.
        support: what ``MPIX_Query_cuda_support`` says; None where there is no such function.
        variables: the environment.
        libraries: text of /proc/self/maps.
    """
    if "cuda" in [kind.strip().partition(":")[0] for kind in kinds.split(",")]:
        return Claim(True, f"MPI says it takes memory of kinds {kinds}")
    if support is not None:
        return Claim(support, f"MPIX_Query_cuda_support says {int(support)}")
    found = environment_claim(variables, libraries)
    if found.aware is None and kinds:
        # MPI 4.1 lets a library list the kinds that were asked for; MPICH with CUDA lists "mpi,system" unasked.
        return Claim(None, f"{found.reason}: its memory kinds are {kinds}")
    return found


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


def _memory_kinds() -> str:
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    finally:
        info.Free()


def query_cuda_support(libraries: str) -> bool | None:
    """The makers' own question, ``MPIX_Query_cuda_support``; None if no MPI in this process has such a function.

    Each MPI library of the process is asked by its file: its symbols are not global where Python has loaded it.

    Args:
        libraries: text of /proc/self/maps.
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


def _loaded_libraries() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
