"""The environment variables of hpczero."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from hpczero.options.values import Transport, digits, node_shape, require

MALLOC_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)

# Torch reads one of them where both are set, and which one depends on its release.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

FIXED_WORKSPACES = (":4096:8", ":16:8")  # the faster one first: 24 MiB of each device

# Of Open MPI, MPICH (hydra), Cray PALS, MVAPICH and SLURM.
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
# Innermost launcher first: mpirun in a batch script starts its ranks through a step of its own. SLURM_NTASKS is not
# among them: it is the job's, and a step may be smaller.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Those of a job. What set-up and tests read is spelt otherwise and no typing error of these.
OWN_VARIABLES = (
    "HPCZERO_STRICT",
    "HPCZERO_FAKE_NODES",
    "HPCZERO_TIMEOUT",
    "HPCZERO_TRANSPORT",
    "HPCZERO_ALGORITHMS",
    "HPCZERO_OVERLAP",
    "HPCZERO_KEEP_HEAP",
    "HPCZERO_GPU_AWARE",
    "HPCZERO_SERIES",
    "HPCZERO_DISTRIBUTED",
)
# By which each of these tells a process its rank.
RANK_VARIABLES = dict(
    zip(SIZE_VARIABLES, ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), strict=True)
)


@dataclass(frozen=True)
class Environment:
    """The environment variables of ours.

    Attributes:
        strict: HPCZERO_STRICT=1: ranks agree on every collective before they make it; for debugging.
        fake_nodes: HPCZERO_FAKE_NODES=2x2: see ``parse_nodes``.
        timeout_s: HPCZERO_TIMEOUT: seconds one collective may take before the job is ended; 0 waits for ever.
        transport: HPCZERO_TRANSPORT: what ``auto`` means.
        algorithms: HPCZERO_ALGORITHMS: what ``auto`` means.
        overlap: HPCZERO_OVERLAP=0: nothing moves between nodes while the model computes.
        distributed: HPCZERO_DISTRIBUTED=0: ``zeroify`` does not initialise torch.distributed.
        keep_heap: HPCZERO_KEEP_HEAP=0: leave the C library's heap as it is; see ``memory/pages.py``.
        tunes_malloc: whether the user has set malloc himself (MALLOC_*_, GLIBC_TUNABLES).
        job: SLURM_JOB_ID, as text; empty outside of SLURM.
        job_of_squeue: the name that squeue knows this very job by; the number of an array's first element means all.
        restart: SLURM_RESTART_COUNT, as text: how often the job was requeued.
        mpi_io: OMPI_MCA_io: which MPI-IO an Open MPI is told to take, as text.
        gpu_aware: HPCZERO_GPU_AWARE=0|1: whether MPI is given device memory; None finds out.
        local_rank: place of this rank on its node, as the launcher says before MPI starts; None where it does not.
        cuda_allocators: those of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF that are set, each with its text.
        job_end: SLURM_JOB_END_TIME: when the job ends, seconds since the epoch; None where SLURM does not say.
        series: HPCZERO_SERIES: jobs that go on with one another's run; see ``attempts``.
        launched_by: the variable by which the innermost launcher says how many ranks it has started; may be empty.
        launched_ranks: its value; None where there is no launcher.
        launched_rank: which of them this process is, as the same launcher says; None where it does not, or cannot be.
        torch_ranks: WORLD_SIZE beside a RANK, as torchrun and its like set both; None where either is missing.
        tasks_per_node: what SLURM says of each node: of the step (``2(x3),1``), or under mpirun SLURM_NTASKS_PER_NODE.
        allocated_ranks: SLURM_NTASKS: ranks that the job, or the allocation of this shell, has room for.
        cache: folder for what is worth remembering between jobs: XDG_CACHE_HOME/hpczero, else ~/.cache/hpczero.
    """

    strict: bool = False
    fake_nodes: str | None = None
    timeout_s: float = 1800.0
    transport: Transport = "auto"
    algorithms: str = "auto"
    overlap: bool = True
    keep_heap: bool = True
    tunes_malloc: bool = False
    cache: Path = Path("~/.cache/hpczero")
    job: str = ""
    job_of_squeue: str = ""
    restart: str = "0"
    mpi_io: str = ""
    gpu_aware: bool | None = None
    local_rank: int | None = None
    cuda_allocators: tuple[tuple[str, str], ...] = ()
    job_end: float | None = None
    series: str = ""
    launched_by: str = ""
    launched_ranks: int | None = None
    tasks_per_node: str = ""
    launched_rank: int | None = None
    torch_ranks: int | None = None
    distributed: bool = True
    allocated_ranks: int | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """The environment from ``variables``, by default those of the process. An empty value counts as unset.

        Raises:
            ConfigError: a value cannot be used; the message names the variable.
        """
        values = os.environ if variables is None else variables
        fake_nodes = values.get("HPCZERO_FAKE_NODES") or None
        if fake_nodes is not None:
            node_shape(fake_nodes, "HPCZERO_FAKE_NODES")
        text = values.get("HPCZERO_TIMEOUT") or str(cls.timeout_s)
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        require(0 <= timeout_s < math.inf, "HPCZERO_TIMEOUT", text, "seconds, 0 or above")
        transport = values.get("HPCZERO_TRANSPORT") or "auto"
        known = get_args(Transport)
        require(transport in known, "HPCZERO_TRANSPORT", transport, f"one of {', '.join(known)}")
        job = values.get("SLURM_JOB_ID", "")
        array, task = values.get("SLURM_ARRAY_JOB_ID"), values.get("SLURM_ARRAY_TASK_ID")
        job_end = values.get("SLURM_JOB_END_TIME", "")
        launched_by = next((n for n in SIZE_VARIABLES if digits(values.get(n, "")) is not None), "")
        of_step = launched_by == "SLURM_STEP_NUM_TASKS"
        tasks = "SLURM_STEP_TASKS_PER_NODE" if of_step else "SLURM_NTASKS_PER_NODE"
        return cls(
            _switch(values, "HPCZERO_STRICT") == "1",
            fake_nodes,
            timeout_s,
            cast(Transport, transport),
            values.get("HPCZERO_ALGORITHMS") or "auto",
            _switch(values, "HPCZERO_OVERLAP") != "0",
            _switch(values, "HPCZERO_KEEP_HEAP") != "0",
            any(value and name in MALLOC_VARIABLES for name, value in values.items()),
            Path(values.get("XDG_CACHE_HOME") or "~/.cache") / "hpczero",
            job,
            f"{array}_{task}" if array and task else job,
            values.get("SLURM_RESTART_COUNT") or "0",
            values.get("OMPI_MCA_io", ""),
            {"0": False, "1": True, "": None}[_switch(values, "HPCZERO_GPU_AWARE")],
            _local_rank(values),
            tuple((name, values[name]) for name in ALLOCATOR_VARIABLES if values.get(name)),
            None if (end := digits(job_end)) is None else float(end),
            values.get("HPCZERO_SERIES", ""),
            launched_by,
            digits(values[launched_by]) if launched_by else None,
            values.get(tasks, ""),
            _launched_rank(values, launched_by),
            digits(values.get("WORLD_SIZE", "")) if values.get("RANK") else None,
            _switch(values, "HPCZERO_DISTRIBUTED") != "0",
            digits(values.get("SLURM_NTASKS", "")),
        )


def fix_cublas_workspace(variables: MutableMapping[str, str] | None = None) -> None:
    """Have cuBLAS take workspaces with which its sums have one order, from the next process or CUDA context on.

    Args:
        variables: the environment, by default that of the process; CUBLAS_WORKSPACE_CONFIG is set if it is not yet.

    Raises:
        ConfigError: the user has set it to another value.

    Source: cuBLAS documentation, sec. 2.1.4, results reproducibility.
    """
    values = os.environ if variables is None else variables
    name = "CUBLAS_WORKSPACE_CONFIG"
    value = values.get(name) or FIXED_WORKSPACES[0]
    expected = f"{' or '.join(FIXED_WORKSPACES)} with parallel.deterministic; unset it"
    require(value in FIXED_WORKSPACES, name, value, expected)
    values[name] = value


def misspelt(variables: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Variables that nobody reads but for their likeness to one of ours, each with the name that is meant."""
    values = os.environ if variables is None else variables
    unknown = [n for n in sorted(values) if n.startswith("HPCZERO") and n not in OWN_VARIABLES]
    meant = [difflib.get_close_matches(name, OWN_VARIABLES, n=1, cutoff=0.85) for name in unknown]
    return [(name, found[0]) for name, found in zip(unknown, meant, strict=True) if found]


def _launched_rank(values: Mapping[str, str], launched_by: str) -> int | None:
    if not launched_by:
        return None
    rank, size = digits(values.get(RANK_VARIABLES[launched_by], "")), digits(values[launched_by])
    return rank if rank is not None and size is not None and rank < size else None


def _local_rank(values: Mapping[str, str]) -> int | None:
    # mpirun inside an sbatch script leaves SLURM_LOCALID at 0 for all ranks, so it comes last.
    ranks = (digits(values.get(name, "")) for name in LOCAL_RANK_VARIABLES)
    return next((rank for rank in ranks if rank is not None), None)


def _switch(values: Mapping[str, str], name: str) -> str:
    value = values.get(name, "")
    require(value in ("", "0", "1"), name, value, "0 or 1")
    return value
