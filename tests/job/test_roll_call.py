"""Of ranks that wait in a hang one asks the others and ends the job, whichever is missing."""

from __future__ import annotations

import pytest

from tests.helpers.mpirun import run_ranks

PROGRAM = """
import time
from hpczero import Topology

topology = Topology.of_world()
topology.barrier()
if topology.rank == {missing}:
    time.sleep(600)
topology.gather(1.0)
"""


@pytest.mark.worth("nothing hangs")
@pytest.mark.parametrize("missing", [0, 3])
def test_one_rank_speaks_for_all_that_wait(missing: int) -> None:
    job = run_ranks(
        4, ["-c", PROGRAM.format(missing=missing)], timeout=60, env={"HPCZERO_TIMEOUT": "2"}
    )
    assert job.returncode == 86, job
    asker = 1 if missing == 0 else 0
    said = [line for line in job.stderr.splitlines() if "hang:" in line]
    assert [line.split(":")[0] for line in said] == [f"[rank {asker}] hang"], job
    assert f"[rank {asker}] missing: rank {missing} is outside of any collective" in job.stderr, job
    assert job.stderr.count("missing: ") == 1, job
    assert job.stderr.count("stacks of this rank") == 1, job


def test_a_rank_that_was_asked_ends_the_job_where_the_asker_does_not() -> None:
    # Rank 1 asks and then does nothing more, as one does whose abort is not delivered.
    program = """
import time
from mpi4py import MPI
from hpczero import Topology
from hpczero.job import watchdog

watchdog.GRACE_S = 1.0
topology = Topology.of_world()
topology.barrier()
if topology.rank == 1:
    topology.watchdog._roll_call.ask(0.1, lambda: "here")
    time.sleep(600)
topology.gather(1.0)
"""
    job = run_ranks(2, ["-c", program], timeout=60, env={"HPCZERO_TIMEOUT": "2"})
    assert job.returncode == 86, job
    assert "[rank 0] hang: Topology.gather has not finished after 2 s" in job.stderr, job
