"""Proves on a few ranks that mpi4py, or h5py with MPI, works with the launcher that started it.

``install/launch.sh 2 python install/trial.py mpi 2`` or ``... hdf5 2``; the last argument is the number of ranks that
the launcher was asked for, because a wrong MPI starts that many jobs of one rank and says nothing. Part of the set-up:
it must need nothing but numpy, mpi4py and h5py.
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
from mpi4py import MPI


def trial_mpi(comm: MPI.Intracomm) -> str:
    """Gather one array over all ranks and return what MPI calls itself."""
    mine = np.full(3, comm.rank, dtype=np.float64)
    gathered = np.empty(3 * comm.size, dtype=np.float64)
    comm.Allgather(mine, gathered)
    if not np.array_equal(gathered, np.repeat(np.arange(comm.size), 3)):
        raise RuntimeError(f"rank {comm.rank}: Allgather returned {gathered.tolist()}")
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def trial_hdf5(comm: MPI.Intracomm) -> str:
    """Write one file from all ranks, read it back on each and return the HDF5 version."""
    import h5py

    if not h5py.get_config().mpi:
        raise RuntimeError("this h5py is serial")
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    path = os.path.join(folder, "trial.h5")
    with h5py.File(path, "w", driver="mpio", comm=comm) as file:
        file.create_dataset("ranks", (comm.size,), dtype="i8")[comm.rank] = comm.rank
    with h5py.File(path, "r") as file:
        found = file["ranks"][:].tolist()
    comm.Barrier()
    if comm.rank == 0:
        os.remove(path)
        os.rmdir(folder)
    if found != list(range(comm.size)):
        raise RuntimeError(f"rank {comm.rank}: wrote ranks 0..{comm.size - 1}, read {found}")
    return str(h5py.version.hdf5_version)


def main() -> None:
    """Run the trial named on the command line; any failure on any rank ends the whole job."""
    comm = MPI.COMM_WORLD
    try:
        kind, expected = sys.argv[1], int(sys.argv[2])
        if comm.size != expected:
            raise RuntimeError(f"the launcher started {expected} ranks and MPI sees {comm.size}")
        version = {"mpi": trial_mpi, "hdf5": trial_hdf5}[kind](comm)
    except Exception as error:
        sys.stderr.write(f"trial: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        comm.Abort(1)
    if comm.rank == 0:
        sys.stdout.write(version + "\n")


main()
