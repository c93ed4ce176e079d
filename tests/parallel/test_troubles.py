"""A rank of any kind of group that raises, stands still or leaves ends the job, which says where. Real MPI jobs."""

from __future__ import annotations

import pytest

from tests.helpers.mpirun import Finished, run_ranks

LOOP = """
import sys, time
import torch
import hpczero
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import mesh_of
from tests.parallel.layouts import sizes, train_laid_out

options = LayoutOptions(**{layout!r})
world = hpczero.Topology.of_world()
topology = hpczero.Topology.create(world.world.comm, mesh=mesh_of(options, world.size, world.size))
calls = 0

def trouble():
    {trouble}

def before(module, args):
    global calls
    calls += 1
    if calls == {call} and topology.rank == {rank}:
        trouble()

import hpczero.run.evaluation as passes
make = passes.passes_of
def passes_of(options, adapter, model, **rest):
    for name, module in model.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            module.register_forward_pre_hook(before)
    return make(options, adapter, model, **rest)
passes.passes_of = passes_of
train_laid_out(sizes(), topology, options, stage=1, steps=50)
"""

LAYOUTS = [
    # Groups of shards have one rank in the first three: the others learn of an error by the end of the job alone.
    ({"tensor": 2}, 2, 1),
    ({"pipeline": 2}, 2, 0),
    ({"pipeline": 2}, 2, 1),
    ({"shard": "1"}, 2, 1),
    ({"tensor": 2, "pipeline": 2}, 4, 1),
    ({"tensor": 2}, 4, 3),
]
IDS = [f"{layout} rank {rank} of {ranks}" for layout, ranks, rank in LAYOUTS]


def run_loop(
    trouble: str,
    layout: dict[str, object],
    ranks: int,
    rank: int,
    *,
    call: int = 17,
    program: str = LOOP,
    **env: str,
) -> Finished:
    """The loop with ``trouble`` on ``rank`` before block call number ``call`` of it."""
    program = program.format(trouble=trouble, layout=layout, rank=rank, call=call)
    return run_ranks(ranks, ["-c", program], timeout=90, env=env)


@pytest.mark.parametrize(("layout", "ranks", "rank"), LAYOUTS, ids=IDS)
def test_a_rank_that_raises_ends_the_job(layout: dict[str, object], ranks: int, rank: int) -> None:
    # The watchdog waits half an hour, the job's own limit here does not.
    job = run_loop("raise RuntimeError('a bad sample')", layout, ranks, rank)
    assert job.returncode == 1, job
    assert "a bad sample" in job.stderr, job


@pytest.mark.worth("nothing hangs")
@pytest.mark.parametrize(("layout", "ranks", "rank"), LAYOUTS[:4], ids=IDS[:4])
def test_a_rank_that_leaves_ends_the_job(layout: dict[str, object], ranks: int, rank: int) -> None:
    job = run_loop("sys.exit(0)", layout, ranks, rank, HPCZERO_TIMEOUT="3")
    if "pipeline" in layout:  # whose blocks run within a call: the rank knows that others wait
        assert job.returncode == 1, job
        assert "sys.exit(0) cut off" in job.stderr, job
    else:
        assert job.returncode == 86, job
        assert "hang:" in job.stderr, job


def test_a_tensor_rank_that_stands_still_ends_the_job_with_the_exchange_named() -> None:
    job = run_loop("time.sleep(600)", {"tensor": 2}, 2, 1, HPCZERO_TIMEOUT="2")
    assert job.returncode == 86, job
    said = "[rank 0] hang: all_reduce of activations (2, 12, 24) has not finished after 2 s"
    assert said in job.stderr, job
    assert "[rank 0] missing: rank 1 is outside of any collective" in job.stderr, job


def test_a_step_of_the_pipeline_that_is_left_ends_the_job() -> None:
    # The peer would take the next step's micro-batch 0 for this one's micro-batch 1.
    caught = """
    made = make(options, adapter, model, **rest)
    take = made.take
    def again(*args):
        try:
            return take(*args)
        except RuntimeError as error:
            print("caught", error, flush=True)
            return take(*args)
    made.take = again
    return made
"""
    last = "    return make(options, adapter, model, **rest)\n"
    assert last in LOOP
    program = LOOP.replace(last, caught)
    bad = "raise RuntimeError('a bad sample')"
    job = run_loop(bad, {"pipeline": 2}, 2, 0, call=15, program=program)
    assert "caught" not in job.stdout, job
    assert job.returncode == 1, job
    assert "RuntimeError cut off a step of the pipeline" in job.stderr, job
