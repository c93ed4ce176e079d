"""The examination: every check in order, each behind a time limit.

    launch -> nodes, cores, binding, threads -> MPI trials -> software -> files -> bandwidth

Facts are gathered to all ranks, so that every rank draws the same findings and ends with the same exit code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from hpczero.doctor import environment as software
from hpczero.doctor import interconnect, launch, probes
from hpczero.doctor.finding import Finding, Status, TimeLimit, failure, warning
from hpczero.files.direct import ALL, Striping, command, striping_of
from hpczero.job.topology import Topology
from hpczero.probe.tiers import Speed, measure_disk

if TYPE_CHECKING:
    from hpczero.comm.awareness import LibraryClaim

# Bytes of a step per parameter, read and written. Everything: fp32 weights for forward and for backward, gradients out;
# then in come weight, gradient and two states, and all but the gradient go out. The second: weight and states alone.
EVERYTHING, OPTIMIZER = (4 + 4 + 16, 4 + 12), (12, 12)


def check_disk(speeds: Sequence[Speed], folder: Path) -> Iterator[Finding]:
    """What the ranks have seen, and seconds of a step for each billion parameters."""
    title, errors = "disk tier", [speed.error for speed in speeds if speed.error]
    if errors:
        yield failure(
            title,
            errors[0],
            "name a folder on a disk of the node that has room and may be written to: --disk FOLDER",
        )
        return
    read, write = (min(getattr(speed, way) for speed in speeds) for way in ("read", "write"))
    value = (
        f"{folder}: {sum(s.read for s in speeds) / 1e9:.2f} GB/s read, {sum(s.write for s in speeds) / 1e9:.2f} GB/s "
        f"written by {len(speeds)} rank(s) at once (slowest rank: {read / 1e9:.2f}, {write / 1e9:.2f}); {speeds[0].how}"
    )
    caveat = next((speed.caveat for speed in speeds if speed.caveat), "")
    if caveat:
        yield warning(title, value, f"{caveat}; a local disk with ext4 or xfs has them")
    else:
        yield Finding(title, value)
    everything, optimizer = (
        1e9 / len(speeds) * (into / read + out / write) for into, out in (EVERYTHING, OPTIMIZER)
    )
    yield Finding(
        "step from disk",
        f"for each billion fp32 parameters over these {len(speeds)} rank(s), with Adam and one micro-batch: "
        f"{everything:.1f} s of disk with everything there ({sum(EVERYTHING)} bytes per parameter), {optimizer:.1f} s "
        f"with the optimizer's part alone ({sum(OPTIMIZER)}), less what computing hides",
    )


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
    return warning(
        "stripes",
        value,
        f"{command(directory, wanted)}, before the first checkpoint there, or --checkpoint.stripes {wanted}; files "
        "that are there stay as they are",
    )


def examine(
    environment: Mapping[str, str], *, directory: Path, disk: Path | None, time_limit_s: float
) -> Iterator[Finding]:
    """Findings one by one, equal on all ranks. Collective over the world: every rank must iterate to the end.

    Args:
        environment: variables of this process.
        directory: where the trial file is written; on several nodes it must be one that all of them see.
        disk: a folder on a disk that shards may rest on, measured by all ranks at once; None: none.
        time_limit_s: seconds each probe may take before the job is aborted.
    """
    world_size = launch.check_world_size(MPI.COMM_WORLD.size, environment)
    yield _library()
    yield world_size
    if world_size.status is Status.FAIL:
        return  # everything below would examine one lonely rank, as often as ranks were started
    yield probes.check_thread_level(probes.thread_level())
    with TimeLimit("the first collective (duplicating the world communicator)", time_limit_s):
        topology = Topology.create(MPI.COMM_WORLD)
    with TimeLimit("gathering facts from all ranks", time_limit_s):
        mine = launch.RankFacts(
            rank=topology.rank,
            host=MPI.Get_processor_name(),
            node_index=topology.node_index,
            local_rank=topology.local_rank,
            cores=launch.affinity(),
            omp_threads=launch.omp_threads(environment),
            shm_nbytes=probes.shared_memory_nbytes(),
            versions=software.installed_versions(),
        )
        ranks = topology.world.comm.allgather(mine)
    yield launch.check_nodes(ranks)
    yield launch.check_cores(ranks, environment)
    yield launch.check_binding(ranks)
    yield launch.check_threads(ranks)
    yield from software.check_environment(environment)
    with TimeLimit("moving bytes between all ranks", time_limit_s):
        moved = probes.try_moves(topology.world.comm)
    yield probes.check_trials("move (Allgather)", moved)
    with TimeLimit("summing over all ranks", time_limit_s):
        summed = probes.try_sums(topology.world.comm)
    yield probes.check_trials("sum (Allreduce)", summed)
    with TimeLimit("the bandwidth measurement", time_limit_s):
        speed = probes.measure_pair(topology.world.comm)
    yield probes.check_pair(speed, same_node=ranks[0].node_index == ranks[-1].node_index)
    if topology.num_nodes > 1 and topology.is_rectangular:
        with TimeLimit("measuring the algorithms between nodes", time_limit_s):
            lines = probes.measure_between_nodes(topology)
        yield from (Finding("between nodes", line) for line in lines)
    yield from interconnect.check_network(
        interconnect.networks(), interconnect.loaded(), environment, topology.num_nodes
    )
    yield from software.check_versions(ranks)
    with TimeLimit("importing torch on rank 0", time_limit_s):
        # One rank only: a thousand imports at once can keep a parallel file system busy for minutes.
        found = software.import_torch() if topology.is_root else None
        torch_facts = topology.world.comm.bcast(found, root=0)
    yield software.check_torch(*torch_facts)
    devices = software.gpu_devices()
    said = _word_of_mpi() if devices else None
    yield software.check_gpu(devices, ranks[0].versions, said.reason if said else "")
    if said:
        yield from interconnect.check_device_memory(
            said.aware is True, interconnect.loaded(), environment
        )
    yield probes.check_shared_memory(ranks)
    vendor, version = MPI.get_vendor()
    yield probes.check_mpi_io(vendor, version, environment)
    with TimeLimit(f"the trial HDF5 file in {directory}", time_limit_s):
        hdf5 = probes.try_hdf5(topology.world.comm, directory)
    yield probes.check_one_mpi(probes.loaded_mpi_libraries())
    yield probes.check_hdf5(hdf5, directory)
    with TimeLimit(f"asking how {directory} is striped", time_limit_s):
        layout = striping_of(directory) if topology.is_root else None
        layout = topology.world.comm.bcast(layout, root=0)
    stripes = check_stripes(layout, directory, topology.num_nodes)
    if stripes is not None:
        yield stripes
    if disk is not None:
        with TimeLimit(f"writing and reading in {disk}", time_limit_s):
            speeds = measure_disk(topology.world, disk)
        yield from check_disk(speeds, disk)
    with TimeLimit("freeing the communicators", time_limit_s):
        topology.free()


def _word_of_mpi() -> LibraryClaim | None:
    try:
        from hpczero.comm.awareness import claim
    except ImportError:  # without torch; that is another finding
        return None
    return claim()


def _library() -> Finding:
    """Which MPI is this? More than one path means that two MPI libraries are loaded."""
    vendor, version = MPI.get_vendor()
    number, standard = (".".join(map(str, each)) for each in (version, MPI.Get_version()))
    paths = ", ".join(probes.loaded_mpi_libraries()) or "linked statically"
    return Finding("MPI", f"{vendor} {number}, MPI {standard}, {paths}")
