"""An exception that leaves a collective on one rank: nothing goes on there; memory that MPI writes to is kept."""

from __future__ import annotations

import textwrap

import pytest

from hpczero.errors import CommError
from hpczero.job.cut_off import CutOff
from hpczero.job.watchdog import Watchdog
from tests.helpers.mpirun import Finished, run_alone, run_ranks

# What a signal handler of the program's raises on rank 1 between two messages of a collective.
LOOP = """
import gc, sys
from mpi4py import MPI
import torch
import hpczero
from hpczero.comm.algorithms import base, pairwise, ring
from hpczero.comm.devices import line

class TimeUp(Exception):
    pass

waits = [0]
armed = []
plain = base.wait_all

def wait_all(requests):
    waits[0] += 1
    if armed and waits[0] >= armed[0]:
        armed.clear()
        raise TimeUp("10 minutes left")
    plain(requests)

for module in (base, pairwise, ring, line):
    module.wait_all = wait_all

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(300, 300)) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

topology = hpczero.Topology.create(MPI.COMM_WORLD, {nodes})
torch.manual_seed(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
hpczero.zeroify(model, optimizer, stage={stage}, topology=topology, transport="hierarchical", overlap={overlap})

def step():
    model(torch.ones(2, 300)).backward()
    optimizer.step()
    optimizer.zero_grad()

def evaluate():
    with torch.no_grad():
        return float(model(torch.ones(2, 300)))

step()
waits[0] = 0
step()
per_step = waits[0]
before = evaluate()
assert per_step > 8, per_step
if topology.rank == 1:
    armed.append(waits[0] + int(per_step * {when}))
caught = None
try:
    step()
except TimeUp as error:
    caught = error

def refused(call):
    try:
        call()
    except hpczero.errors.CommError as error:
        assert "TimeUp (10 minutes left) cut off" in str(error), error
        assert "go on from a checkpoint" in str(error), error
        return
    raise AssertionError(call)

def look():
    with hpczero.gathered(model):
        pass

if topology.rank == 1:
    assert caught is not None
    if not {overlap}:  # the thread's failure is an error of what waits for the thread
        refused(look)
        refused(topology.barrier)
        refused(lambda: topology.gather(1.0))
        refused(lambda: hpczero.release(model))
    try:
        assert evaluate() == before, "it used what came of it"
    except (hpczero.errors.CommError, hpczero.errors.StepError, TimeUp) as error:
        assert any(each in repr(error) for each in ("TimeUp", "that step did not finish")), error
    # A heap that was written to after it was given back dies of what follows.
    caught = None
    topology.free()
    del model, optimizer
    gc.collect()
    for size in range(1, 400):
        held = [torch.full((size * 97,), 1.0) for _ in range(20)]
        MPI.COMM_WORLD.Iprobe()
        assert all(bool((each == 1.0).all()) for each in held)
    print("whole", flush=True)
    if {overlap}:
        raise RuntimeError("the end")
    topology.barrier()
"""


def cut_off(
    nodes: tuple[int, ...], stage: int, when: float, *, overlap: bool = False, algorithms: str = ""
) -> Finished:
    """The loop, cut off on rank 1 at the part ``when`` of the messages of a step."""
    program = LOOP.format(nodes=nodes, stage=stage, when=when, overlap=overlap)
    algorithms = algorithms or "all_gather=pairwise,reduce_scatter=pairwise"
    return run_ranks(
        len(nodes), ["-c", program], timeout=60, env={"HPCZERO_ALGORITHMS": algorithms}
    )


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1)], ids=["pairs", "uneven"])
@pytest.mark.parametrize(("stage", "when"), [(3, 0.2), (3, 0.9), (1, 0.3), (2, 0.8)])
def test_after_a_collective_that_was_cut_off_its_rank_makes_no_call_and_keeps_its_heap(
    nodes: tuple[int, ...], stage: int, when: float
) -> None:
    job = cut_off(nodes, stage, when)
    assert "whole" in job.stdout, job
    assert job.returncode == 1, job
    assert "CommError: rank 1: Topology.barrier cannot begin" in job.stderr, job


def test_a_ring_that_was_cut_off_is_as_final() -> None:
    job = cut_off((0, 1, 2), 3, 0.4, algorithms="all_gather=ring")
    assert "whole" in job.stdout, job
    assert job.returncode == 1, job


def test_a_failure_between_nodes_on_the_thread_is_as_final() -> None:
    job = cut_off((0, 1), 3, 0.2, overlap=True)
    assert "whole" in job.stdout, job
    assert job.returncode == 1, job


def test_a_program_alone_goes_on_after_what_it_caught() -> None:
    program = """
    import torch, hpczero
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hpczero.zeroify(model, optimizer, stage=1)
    topology = hpczero.sharding(model).topology
    try:
        with topology.watchdog.collective("a sum"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print("went on")
    """
    job = run_alone(["-c", textwrap.dedent(program)], timeout=60)
    assert "went on" in job.stdout, job


def test_errors_that_all_ranks_raise_cut_off_nothing() -> None:
    watchdog = Watchdog(0, 0.0)
    error = CommError("ranks disagree")
    error.agreed = True
    with pytest.raises(CommError, match="disagree"), watchdog.collective("a gather"):
        raise error
    with watchdog.watch("the next"):
        pass


def test_the_first_call_that_was_cut_off_is_the_one_that_is_named() -> None:
    cut_off = CutOff(3)
    cut_off.check("a barrier")
    for number in (1, 2):
        cut_off.note(f"gather {number}", TimeoutError("late"))
    assert cut_off.happened()
    with pytest.raises(
        CommError, match=r"rank 3: a barrier cannot .* TimeoutError \(late\) cut off gather 1 on"
    ):
        cut_off.check("a barrier")
