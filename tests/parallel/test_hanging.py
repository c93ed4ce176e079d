"""A job in which a tensor rank is missing ends by itself and says which exchange waits. A real MPI job."""

from __future__ import annotations

from tests.helpers.mpirun import run_ranks

LOOP = """
import time
import torch
import hpczero
from hpczero.job.mesh import Mesh
from hpczero.parallel import Rule, Split, split

topology = hpczero.Topology.of_world(mesh=Mesh.of(2, tensor=2))
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
split(model, topology, Rule({"0": Split(0), "2": Split(1)}))
for step in range(1000):
    if step == 3 and topology.rank == 1:
        time.sleep(600)
    model(torch.ones(3, 4)).sum().backward()
"""


def test_a_tensor_rank_that_stands_still_ends_the_job_with_the_exchange_named() -> None:
    job = run_ranks(2, ["-c", LOOP], timeout=60, env={"HPCZERO_TIMEOUT": "2"})
    assert job.returncode == 86, job
    said = "[rank 0] hang: all_reduce of activations (3, 4) has not finished after 2 s"
    assert said in job.stderr, job
    assert "[rank 0] missing: rank 1 is outside of any collective" in job.stderr, job
