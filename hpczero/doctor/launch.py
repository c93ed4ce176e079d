"""How the job was launched: rank count, nodes, cores, binding, threads. Facts of the ranks come in as values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpczero.doctor.finding import Finding, failure, warning
from hpczero.job.log import spans
from hpczero.options.environment import SIZE_VARIABLES as LAUNCHED_SIZES
from hpczero.options.values import digits

# Innermost launcher first: a step of a job, or mpirun in it, may start fewer ranks than SLURM_NTASKS and be right.
SIZE_VARIABLES = (*LAUNCHED_SIZES, "SLURM_NTASKS")
MOST_SHOWN = 8  # ranks
YIELD_VARIABLES = ("OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_POLLS_BEFORE_YIELD")


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows about its place.

    Attributes:
        rank: rank in the world communicator.
        host: name MPI gives to the machine.
        node_index: node, counted in order of the first rank on it.
        local_rank: rank within the node.
        cores: core numbers the process may run on (its affinity mask).
        omp_threads: OMP_NUM_THREADS, or None where it is unset or no number.
        shm_nbytes: (size, free) of /dev/shm in bytes, or None where it does not exist.
        versions: installed version by package name.
    """

    rank: int
    host: str
    node_index: int
    local_rank: int
    cores: frozenset[int]
    omp_threads: int | None
    shm_nbytes: tuple[int, int] | None
    versions: Mapping[str, str]


def affinity() -> frozenset[int]:
    """Cores this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def omp_threads(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS of the outermost level, or None."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return digits(first)


def check_world_size(size: int, environment: Mapping[str, str]) -> Finding:
    """Do the ranks see each other? A wrong PMI plugin starts N jobs of one rank each and says nothing.

    Args:
        size: size of the world communicator.
        environment: variables of this process.

    Source: facts: open-mpi/ompi#13523, mpi4py#155: srun with the wrong --mpi plugin gives silent singletons.
    """
    said = {name: digits(environment.get(name, "")) for name in SIZE_VARIABLES}
    claims = {name: size for name, size in said.items() if size is not None}
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    if next(iter(claims), "") != "SLURM_STEP_NUM_TASKS":
        claims.pop("SLURM_STEP_NUM_TASKS", None)  # that of mpirun's daemons
    by_torch = digits(environment.get("WORLD_SIZE", "")) if environment.get("RANK") else None
    if not claims and size == 1 and (by_torch or 1) > 1:
        return failure(
            "world size",
            f"{ranks}, but WORLD_SIZE={by_torch}: started by torchrun or its like, whose processes MPI does not see",
            f"start with mpirun -n {by_torch} python ..., or srun",
        )
    if not claims:
        return Finding("world size", f"{ranks}, no launcher in the environment")
    name, claimed = next(iter(claims.items()))
    if size != claimed:
        return failure(
            "world size",
            f"{ranks}, but {name}={claimed}: the ranks do not see each other",
            "start with the launcher of the MPI that mpi4py was built with (srun --mpi=list shows the plugins: "
            "--mpi=pmix for Open MPI, --mpi=pmi2 or --mpi=cray_shasta for MPICH; or that MPI's own mpirun); "
            "inside a batch script start python through srun or mpirun",
        )
    others = [f"{n}={c}" for n, c in claims.items() if c != size]
    if others:
        return warning(
            "world size",
            f"{ranks}, confirmed by {name}, but {', '.join(others)}",
            f"a part of the allocation is idle: start {claims['SLURM_NTASKS']} ranks if that is not on purpose"
            if "SLURM_NTASKS" in claims
            else "two launchers are nested: start the job with one of them",
        )
    return Finding("world size", f"{ranks}, confirmed by {' and '.join(claims)}")


def by_node(ranks: Sequence[RankFacts]) -> dict[int, list[RankFacts]]:
    """Ranks of each node, in rank order."""
    nodes: dict[int, list[RankFacts]] = {}
    for facts in ranks:
        nodes.setdefault(facts.node_index, []).append(facts)
    return nodes


def check_nodes(ranks: Sequence[RankFacts]) -> Finding:
    """Nodes and ranks per node; on uneven nodes the largest one is waited for, and ``ipc`` does not work."""
    nodes = by_node(ranks)
    counts = [len(members) for members in nodes.values()]
    shown = ", ".join(
        f"node {index} ({members[0].host}): local ranks 0-{len(members) - 1}"
        for index, members in list(nodes.items())[:4]
    )
    value = f"{len(nodes)}: {shown}{', ...' if len(nodes) > 4 else ''}"
    if len(set(counts)) > 1:
        return warning(
            "nodes",
            f"{value}; ranks per node differ, {min(counts)} to {max(counts)}",
            "start the same number of ranks on every node (srun --ntasks-per-node, mpirun --map-by ppr:N:node)",
        )
    return Finding("nodes", value)


def check_cores(ranks: Sequence[RankFacts], environment: Mapping[str, str]) -> Finding:
    """Does every rank have a core? MPI polls, so two ranks on one core block each other for whole time slices."""
    nodes = by_node(ranks)
    crowded = {
        index: (len(members), len(_union(members)))
        for index, members in nodes.items()
        if len(members) > len(_union(members))
    }
    fewest = min(len(_union(members)) for members in nodes.values())
    most = max(len(members) for members in nodes.values())
    value = f"at least {fewest} usable per node for at most {most} rank{'' if most == 1 else 's'}"
    if not crowded:
        return Finding("cores", value)
    index, (count, cores) = next(iter(crowded.items()))
    value = f"node {index} runs {count} ranks on {cores} core{'' if cores == 1 else 's'}: oversubscribed"
    yields = any(environment.get(name) for name in YIELD_VARIABLES)
    remedy = "start fewer ranks per node, or give them more cores (srun --cpus-per-task, mpirun --bind-to none)"
    if not yields:
        remedy += "; for a trial run, export OMPI_MCA_mpi_yield_when_idle=1 (MPICH: MPIR_CVAR_POLLS_BEFORE_YIELD=1)"
    return warning("cores", value, remedy)


def check_binding(ranks: Sequence[RankFacts]) -> Finding:
    """Are ranks kept apart? An unbound rank migrates away from its memory; two ranks bound to one core take turns."""
    shown = [f"rank {facts.rank}: {_ranges(facts.cores)}" for facts in ranks[:MOST_SHOWN]]
    value = ", ".join(shown) + (", ..." if len(ranks) > MOST_SHOWN else "")
    for index, members in by_node(ranks).items():
        cores = _union(members)
        if len(members) == 1 or len(members) > len(cores):
            continue  # nothing to separate, or no way to
        disjoint = sum(len(facts.cores) for facts in members) == len(cores)
        if not disjoint:
            return warning(
                "binding",
                f"{value}; on node {index} ranks share cores",
                "bind each rank to its own cores: srun --cpu-bind=cores --cpus-per-task=C, "
                "or mpirun --map-by slot:PE=C --bind-to core",
            )
    return Finding("binding", value)


def check_threads(ranks: Sequence[RankFacts]) -> Finding:
    """Do the OpenMP threads of all ranks fit the cores? torch takes every core it sees when nothing is said."""
    for index, members in by_node(ranks).items():
        cores = len(_union(members))
        fair = max(cores // len(members), 1)
        remedy = f"export OMP_NUM_THREADS={fair} (cores divided by ranks per node)"
        unset = [facts.rank for facts in members if facts.omp_threads is None]
        if unset and len(members) > 1:
            value = f"OMP_NUM_THREADS is not set on rank {unset[0]}: your own programs would use every core on each"
            return warning("threads", value, remedy)
        wanted = sum(facts.omp_threads or len(facts.cores) for facts in members)
        if wanted > cores and wanted > len(members):
            value = f"node {index} would run {wanted} OpenMP threads on {cores} cores"
            return warning("threads", value, remedy)
        for facts in members:
            if (facts.omp_threads or 1) > len(facts.cores):
                value = f"rank {facts.rank} runs {facts.omp_threads} OpenMP threads on {len(facts.cores)} core(s)"
                return warning("threads", value, remedy)
    counts = sorted({str(facts.omp_threads or "all cores") for facts in ranks})
    return Finding("threads", f"OMP_NUM_THREADS: {', '.join(counts)}")


def _union(members: Sequence[RankFacts]) -> frozenset[int]:
    return frozenset().union(*(facts.cores for facts in members))


def _ranges(cores: frozenset[int]) -> str:
    """``cores 0-3,8``."""
    return f"core{'' if len(cores) == 1 else 's'} {spans(sorted(cores), ',')}"
