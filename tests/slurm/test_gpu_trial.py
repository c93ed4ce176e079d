"""The trial of device memory inside a job that srun has started: two ranks of its own, on one node and on two."""

from __future__ import annotations

import sys

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.machine

# Every rank starts MPI, and those beside the first hold their step until it has tried.
PROGRAM = """
import os
from mpi4py import MPI
from hpczero.comm.awareness import launchers, try_in_a_job
if MPI.COMM_WORLD.rank == 0:
    print(len(launchers(os.environ)), "tried", *try_in_a_job(os.environ), flush=True)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.limit(150)
@pytest.mark.slow
def test_ranks_of_srun_try_beside_their_own_step(slurm: SlurmCluster) -> None:
    line = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmix", sys.executable]
    given = {"SLURM_MPI_TYPE": "pmix"}
    done = slurm.run([*line, "-c", PROGRAM], env=given, check=False, timeout=120)
    assert "2 tried True two ranks have tried it on one node, and two on two" in done.stdout, done
