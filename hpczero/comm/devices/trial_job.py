"""The job of two ranks that tries whether MPI takes device memory.

Owns: by which launcher it is started, with which environment, on how many nodes. Must not know: what the ranks do
(``trial``), what is decided by it (``awareness``).

The trial goes the way the job itself came. mpirun starts both ranks on this node. A job of several nodes is started by
srun or needs ssh, which may not be allowed; so only srun tries two nodes as well. Ranks of two nodes use the network's
own path for device memory, which can fail where shared memory works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from hpczero.options.environment import Environment

TRIAL_S = 60.0
TRIAL = "hpczero.comm.devices.trial"

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
    """Send device memory between two ranks started for it. Not collective; takes seconds.

    Args:
        variables: the environment of this process.

    Returns:
        Whether it worked, and what to say of it.
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
