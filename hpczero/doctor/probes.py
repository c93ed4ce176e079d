"""Probes: operations tried over a communicator, because what a library claims and what it does differ.

Open MPI 4.1 names a half-precision type and refuses to sum it, and sums bfloat16 bytes without an error.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpczero.doctor.finding import Finding, failure, warning
from hpczero.doctor.launch import RankFacts
from hpczero.job.topology import Topology

SHM_WANTED_NBYTES = 2**30
_MPI_LIBRARY = re.compile(
    r"libmpi(ch|_(cray|gnu|nvidia|amd|aocc|intel)(_\d+)*)?(-[0-9a-f]+)?\.(so|dylib)(\.\d+)*"
)


@dataclass(frozen=True)
class Hdf5Facts:
    """What h5py can do here.

    Attributes:
        version: of h5py; empty where it is not installed.
        library: version of the HDF5 library.
        parallel: whether it was built with the mpio driver.
        trial_error: why the trial write failed; empty if it worked.
    """

    version: str
    library: str = ""
    parallel: bool = False
    trial_error: str = ""


def mpi_libraries(maps: Iterable[str]) -> list[str]:
    """Paths of the MPI libraries that a process has loaded, from the lines of its memory map."""
    paths = {line.split()[-1] for line in maps if line.split()}
    return sorted(path for path in paths if _MPI_LIBRARY.fullmatch(Path(path).name))


def loaded_mpi_libraries() -> list[str]:
    """Paths of the MPI libraries in this process; empty where the system does not list them."""
    return mpi_libraries(Path("/proc/self/maps").read_text().splitlines())


def check_hdf5(facts: Hdf5Facts, directory: Path) -> Finding:
    """Can token files and checkpoints be written here?"""
    title = "HDF5"
    if not facts.version:
        remedy = "pip install h5py (built against parallel HDF5 where there is one: HDF5_MPI=ON CC=mpicc)"
        return failure(title, f"h5py cannot be imported: {facts.trial_error}", remedy)
    kind = "parallel (mpio)" if facts.parallel else "serial"
    value = f"h5py {facts.version}, HDF5 {facts.library}, {kind}"
    if facts.trial_error:
        return failure(
            title,
            f"{value}: trial write in {directory} failed: {facts.trial_error}",
            "check quota and permissions, or name a directory on the parallel file system with --directory",
        )
    if not facts.parallel:
        return warning(
            title,
            f"{value}, trial write works",
            "for one collective writer instead of per-rank byte offsets, build h5py against parallel HDF5: CC=mpicc "
            "HDF5_MPI=ON pip install --no-build-isolation --no-binary=h5py h5py",
        )
    return Finding(title, f"{value}, trial write works")


def check_one_mpi(paths: Sequence[str]) -> Finding:
    """Do mpi4py and h5py use the same MPI? Two in one process crash, or hang in the first parallel write."""
    if len(paths) > 1:
        return failure(
            "MPI libraries",
            f"{len(paths)} loaded into one process: {', '.join(paths)}",
            "rebuild h5py and mpi4py with the same mpicc (pip install --no-binary=h5py,mpi4py --force-reinstall)",
        )
    return Finding("MPI libraries", "one, shared by mpi4py and h5py")


def check_mpi_io(vendor: str, version: tuple[int, ...], environment: Mapping[str, str]) -> Finding:
    """Is the MPI-IO layer one that writes what it is given?

    Source: open-mpi/ompi#12718: OMPIO before 4.1.7 and 5.0.6 can write wrong data without an error.
    """
    if vendor != "Open MPI":
        return Finding("MPI-IO", f"ROMIO of {vendor}")
    fixed = (5, 0, 6) if version >= (5,) else (4, 1, 7)
    choice = environment.get("OMPI_MCA_io", "")
    if choice.startswith("romio") or (choice.startswith("^") and "ompio" in choice):
        return Finding("MPI-IO", f"ROMIO, by OMPI_MCA_io={choice}")
    if version < fixed:
        return warning(
            "MPI-IO",
            f"OMPIO of Open MPI {'.'.join(map(str, version))}, which can lose data in parallel writes; "
            "checkpoints are written without it (--checkpoint.writer auto)",
            f"for other programs: export OMPI_MCA_io=^ompio, or use Open MPI {'.'.join(map(str, fixed))} or newer",
        )
    return Finding("MPI-IO", "OMPIO")


def check_shared_memory(ranks: Sequence[RankFacts]) -> Finding:
    """Is /dev/shm large enough for node-shared buffers? Where it is not, the first touch kills the rank (SIGBUS)."""
    missing = [facts for facts in ranks if facts.shm_nbytes is None]
    remedy = (
        "enlarge it (mount -o remount,size=50% /dev/shm; container: --shm-size or --ipc=host); "
        "until then the ranks of a node cannot share buffers"
    )
    if missing:
        value = f"/dev/shm does not exist on {missing[0].host}"
        return warning("shared memory", value, remedy)
    least = min(ranks, key=lambda facts: (facts.shm_nbytes or (0, 0))[1])
    size, free = least.shm_nbytes or (0, 0)
    value = f"/dev/shm {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free (least: {least.host})"
    if free < SHM_WANTED_NBYTES:
        return warning("shared memory", value, remedy)
    return Finding("shared memory", value)


def shared_memory_nbytes(path: str = "/dev/shm") -> tuple[int, int] | None:
    """(size, free) in bytes, or None where there is no such file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


SLOW_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class PairSpeed:
    """Ping-pong between rank 0 and ``peer``: half of a round trip, and bytes over half of a large round trip."""

    peer: int
    nbytes: int
    latency_s: float
    bytes_per_s: float


def check_thread_level(name: str) -> Finding:
    """May a second thread communicate? Device transports drive MPI from one."""
    if name != "multiple":
        return warning(
            "thread level",
            f"{name}, wanted: multiple",
            "use an MPI built with thread support, and leave mpi4py.rc.thread_level alone; "
            "until then only transports without a communication thread are safe",
        )
    return Finding("thread level", name)


def check_trials(title: str, errors: Mapping[str, str]) -> Finding:
    """Verdict over trial operations, by dtype."""
    wrong = {dtype: text for dtype, text in errors.items() if text}
    if wrong:
        return failure(
            title,
            "; ".join(f"{dtype}: {text}" for dtype, text in wrong.items()),
            "this MPI library or its network module is broken for plain host memory: load another MPI module and "
            "rebuild mpi4py with it (pip install --no-binary=mpi4py --force-reinstall mpi4py)",
        )
    return Finding(title, f"{', '.join(errors)} proved by a trial")


def check_pair(speed: PairSpeed | None, same_node: bool) -> Finding:
    """Is the path between two ranks the fast one?"""
    if speed is None:
        return Finding("bandwidth", "not measured: one rank")
    where = "same node" if same_node else "other node"
    value = (
        f"{speed.bytes_per_s / 1e9:.2f} GB/s at {speed.nbytes >> 20} MiB, latency {speed.latency_s * 1e6:.1f} us "
        f"(ranks 0 and {speed.peer}, {where})"
    )
    if speed.bytes_per_s < SLOW_BYTES_PER_S:
        remedy = (
            "shared memory inside the node is not used, or the ranks share a core: see binding and cores above"
            if same_node
            else "messages probably use TCP: check that the MPI was built for this fabric "
            "(ompi_info | grep -i ucx, fi_info) and that no variable forces tcp"
        )
        return warning("bandwidth", value, remedy)
    return Finding("bandwidth", value)


MOVED_DTYPES = ("fp32", "bf16", "fp16")
SUMMED_DTYPES = ("float64", "int64", "float32")
SPEED_NBYTES = 16 * 2**20  # past the caches, as a unit's parameters are
SPEED_BUDGET_S = 0.2
SLAB_NUMEL = 1024


def thread_level() -> str:
    """The thread level MPI granted."""
    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return names[MPI.Query_thread()]


def try_moves(comm: MPI.Comm) -> dict[str, str]:
    """Error text by dtype for moving each dtype as bytes; empty text means right. Collective over ``comm``."""
    return {dtype: _attempt(comm, partial(_move, comm, dtype)) for dtype in MOVED_DTYPES}


def try_sums(comm: MPI.Comm) -> dict[str, str]:
    """Error text by dtype for Allreduce of each dtype; empty text means right. Collective over ``comm``."""
    return {dtype: _attempt(comm, partial(_sum, comm, dtype)) for dtype in SUMMED_DTYPES}


def measure_pair(comm: MPI.Comm) -> PairSpeed | None:
    """Latency and bandwidth between the first and the last rank; None for one rank. Collective over ``comm``.

    The last rank, because with the usual block placement it is on another node as soon as there are two.
    """
    peer = comm.size - 1
    if peer == 0:
        return None
    small = _half_round_trip(comm, peer, 8)
    large = _half_round_trip(comm, peer, SPEED_NBYTES)
    latency_s, large_s = comm.bcast((small, large), root=0)
    return PairSpeed(peer, SPEED_NBYTES, latency_s, SPEED_NBYTES / large_s)


def measure_between_nodes(topology: Topology) -> list[str]:
    """Which algorithms ``auto`` takes between these nodes, and why. Collective over the topology's world."""
    import torch  # as every rank of a training run does

    from hpczero.comm.tuning import tune

    selection = tune(topology.world, torch.float32)
    return [selection.describe(), *selection.table()]


def try_hdf5(comm: MPI.Comm, directory: Path) -> Hdf5Facts:
    """Write a small file, in parallel where h5py can, read it back and remove it. Collective over ``comm``."""
    missing = _first(comm, _import_error())
    if missing:
        return Hdf5Facts(version="", trial_error=missing)
    import h5py

    version, parallel = h5py.version, bool(h5py.get_config().mpi)
    folder, problem = comm.bcast(_make_folder(directory) if comm.rank == 0 else None, root=0)
    if folder is not None:
        file = folder / "trial.h5"
        # Agreed before rank 0 reads: a rank that could not write must not look like a good file.
        problem = _first(comm, _write(comm, file, parallel))
        if comm.rank == 0:
            problem = problem or _verify(file, comm.size if parallel else 1)
            shutil.rmtree(folder, ignore_errors=True)
        problem = comm.bcast(problem, root=0)
    return Hdf5Facts(version.version, version.hdf5_version, parallel, problem)


def _attempt(comm: MPI.Comm, trial: Callable[[], bool]) -> str:
    """Run ``trial`` on every rank and agree: the first error of any rank, or empty. Collective over ``comm``."""
    try:
        mine = "" if trial() else f"wrong values on rank {comm.rank}"
    except (MPI.Exception, NotImplementedError) as error:
        mine = f"rank {comm.rank}: {error}"
    return _first(comm, mine)


def _first(comm: MPI.Comm, error: str) -> str:
    """The error of the lowest rank that has one, or empty; equal on all ranks. Collective over ``comm``."""
    return next(filter(None, comm.allgather(error)), "")


def _bits(dtype: str, rank: int) -> np.ndarray:
    """Raw bytes that ``rank`` sends, (2 * itemsize * 257,) uint8: both signs, small and large magnitudes."""
    values = np.float32(rank + 1) * np.logspace(-3, 1, 257, dtype=np.float32)
    values = np.concatenate([values, -values])
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint8)
    raw = values.view(np.uint8)
    # bfloat16 is the upper half of an fp32; numpy has no such type and the trial needs only its bytes.
    return raw if dtype == "fp32" else values.view(np.uint16)[1::2].copy().view(np.uint8)


def _move(comm: MPI.Comm, dtype: str) -> bool:
    mine = _bits(dtype, comm.rank)
    full = np.zeros(mine.size * comm.size, dtype=np.uint8)
    comm.Allgather([mine, MPI.BYTE], [full, MPI.BYTE])
    expected = np.concatenate([_bits(dtype, rank) for rank in range(comm.size)])
    return bool(np.array_equal(full, expected))


def _sum(comm: MPI.Comm, dtype: str) -> bool:
    total = np.zeros(257, dtype=dtype)
    comm.Allreduce(np.full(257, comm.rank + 1, dtype=dtype), total, op=MPI.SUM)
    return bool((total == comm.size * (comm.size + 1) // 2).all())


def _half_round_trip(comm: MPI.Comm, peer: int, nbytes: int) -> float:
    """Seconds one message takes, measured on rank 0; 0.0 on other ranks. Called by all ranks."""
    if comm.rank not in (0, peer):
        return 0.0
    sent = np.ones(nbytes, dtype=np.uint8)
    received = np.zeros(nbytes, dtype=np.uint8)  # one buffer for both would stay in the cache

    def round_trips(count: int) -> float:
        start = MPI.Wtime()
        for _ in range(count):
            if comm.rank == 0:
                comm.Send(sent, dest=peer)
                comm.Recv(received, source=peer)
            else:
                comm.Recv(received, source=0)
                comm.Send(sent, dest=0)
        return MPI.Wtime() - start

    round_trips(1)  # connections and page faults
    first = round_trips(1)
    if comm.rank != 0:
        round_trips(comm.recv(source=0))
        return 0.0
    count = min(int(SPEED_BUDGET_S / max(first, 1e-7)), 1000)
    comm.send(count, dest=peer)
    return (first if count == 0 else round_trips(count) / count) / 2


def _import_error() -> str:
    try:
        import h5py  # noqa: F401  # only whether it can be imported
    except (ImportError, OSError) as error:  # OSError: an HDF5 library that does not load
        return str(error)
    return ""


def _make_folder(directory: Path) -> tuple[Path | None, str]:
    try:
        return Path(tempfile.mkdtemp(prefix=".hpczero-doctor-", dir=directory)), ""
    except OSError as error:
        return None, str(error)


def _slab(rank: int) -> np.ndarray:
    return np.arange(rank * SLAB_NUMEL, (rank + 1) * SLAB_NUMEL, dtype=np.float64)


def _write(comm: MPI.Comm, file: Path, parallel: bool) -> str:
    """This rank's slab into ``file``; the error text, or empty. Collective where ``parallel``."""
    import h5py

    if not parallel and comm.rank != 0:
        return ""
    how = {"driver": "mpio", "comm": comm} if parallel else {}
    try:
        with h5py.File(file, "w", **how) as handle:
            slabs = comm.size if parallel else 1
            dataset = handle.create_dataset("trial", shape=(slabs * SLAB_NUMEL,), dtype=np.float64)
            dataset[comm.rank * SLAB_NUMEL : (comm.rank + 1) * SLAB_NUMEL] = _slab(comm.rank)
    except (OSError, RuntimeError, ValueError) as error:
        return f"rank {comm.rank}: {error}"
    return ""


def _verify(file: Path, slabs: int) -> str:
    import h5py

    try:
        with h5py.File(file, "r") as handle:
            good = np.array_equal(
                handle["trial"][()], np.concatenate([_slab(r) for r in range(slabs)])
            )
    except (OSError, KeyError) as error:
        return f"reading back: {error}"
    return "" if good else "reading back gave other numbers than were written"
