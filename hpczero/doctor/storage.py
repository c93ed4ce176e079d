"""Where bytes go when they leave a rank: HDF5, MPI-IO, shared memory.

Owns: the findings. Must not know: MPI itself (``probes`` writes the trial file), checkpoint formats, torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.doctor.finding import Finding, Status
from hpczero.doctor.launch import RankFacts

SHM_WANTED_NBYTES = 2**30
_MPI_LIBRARY = re.compile(r"libmpi(ch|_cray)?(-[0-9a-f]+)?\.(so|dylib)(\.\d+)*")


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
    maps = Path("/proc/self/maps")
    return mpi_libraries(maps.read_text().splitlines()) if maps.exists() else []


def check_hdf5(facts: Hdf5Facts, directory: Path) -> Finding:
    """Can token files and checkpoints be written here?"""
    title = "HDF5"
    if not facts.version:
        remedy = "pip install h5py (built against parallel HDF5 where there is one: HDF5_MPI=ON CC=mpicc)"
        return Finding(title, f"h5py cannot be imported: {facts.trial_error}", Status.FAIL, remedy)
    kind = "parallel (mpio)" if facts.parallel else "serial"
    value = f"h5py {facts.version}, HDF5 {facts.library}, {kind}"
    if facts.trial_error:
        return Finding(
            title,
            f"{value}: trial write in {directory} failed: {facts.trial_error}",
            Status.FAIL,
            "check quota and permissions, or name a directory on the parallel file system with --directory",
        )
    if not facts.parallel:
        return Finding(
            title,
            f"{value}, trial write works",
            Status.WARN,
            "for one collective writer instead of per-rank byte offsets, build h5py against parallel HDF5: CC=mpicc "
            "HDF5_MPI=ON pip install --no-build-isolation --no-binary=h5py h5py",
        )
    return Finding(title, f"{value}, trial write works")


def check_one_mpi(paths: Sequence[str]) -> Finding:
    """Do mpi4py and h5py use the same MPI? Two in one process crash, or hang in the first parallel write."""
    if len(paths) > 1:
        return Finding(
            "MPI libraries",
            f"{len(paths)} loaded into one process: {', '.join(paths)}",
            Status.FAIL,
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
        return Finding(
            "MPI-IO",
            f"OMPIO of Open MPI {'.'.join(map(str, version))}, which can lose data in parallel writes; "
            "checkpoints are written without it (--checkpoint.writer auto)",
            Status.WARN,
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
        return Finding("shared memory", value, Status.WARN, remedy)
    least = min(ranks, key=lambda facts: (facts.shm_nbytes or (0, 0))[1])
    size, free = least.shm_nbytes or (0, 0)
    value = f"/dev/shm {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free (least: {least.host})"
    if free < SHM_WANTED_NBYTES:
        return Finding("shared memory", value, Status.WARN, remedy)
    return Finding("shared memory", value)


def shared_memory_nbytes(path: str = "/dev/shm") -> tuple[int, int] | None:
    """(size, free) in bytes, or None where there is no such file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free
