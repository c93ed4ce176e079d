"""The memory check of layouts: a rank is counted with its part, and a host with the parts of all its ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.errors import ConfigError
from hpczero.job.limits import Room, usage
from hpczero.models import PRESETS
from hpczero.options.config import ParallelOptions, RunConfig, TrainOptions
from hpczero.parallel import close
from hpczero.plan.sizing import Batch
from hpczero.run.evaluation import passes_of
from hpczero.run.starting.building import build
from hpczero.run.starting.header import describe_layout, describe_run, describe_sent
from hpczero.run.starting.room_check import RoomCheck, run_of
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import laid_out, samples_of, sizes, take

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

SMALL = sizes(hidden=96, heads=4, layers=5, vocab_size=61)
XL = PRESETS["gpt2-xl"]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tensor": 2}, {"pipeline": 2}, {"shard": "1"}, {"context": 2}],
    4: [{"tensor": 2, "pipeline": 2}, {"pipeline": 4}, {"shard": "2"}, {"tensor": 2}],
}
ACCUMULATION = 3


def planned(topology: Topology, parallel: ParallelOptions, model: Any = SMALL) -> Any:
    """What the memory check looks at."""
    config = RunConfig(
        parallel=parallel, train=TrainOptions(micro_batch=2, accumulation=ACCUMULATION)
    )
    batch = Batch.resolve(config.train, topology.data.size)
    return run_of(config, model, batch, topology, is_host=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_low_estimate_is_at_most_what_a_rank_holds_and_a_high_one_at_least(
    comm: MPI.Intracomm, stage: int
) -> None:
    for layout in LAYOUTS[comm.size]:
        parallel = ParallelOptions(stage=stage, transport="flat", **layout)  # type: ignore[arg-type]
        with laid_out(comm, parallel) as topology:
            run = planned(topology, parallel)
            parallel_assert(comm, run.layout is not None)
            adapter, config = GPTAdapter(SMALL), RunConfig(parallel=parallel)
            model, optimizer = build(config, adapter, topology, HostAccelerator())
            passes = passes_of(
                parallel, adapter, model, accumulation=ACCUMULATION, accelerator=HostAccelerator()
            )

            take(passes, 0, samples_of(topology))
            optimizer.step()
            state = hpczero.sharding(model)
            held = sum(state.memory.peak.values()) + state.optimizer_nbytes()
            # The plan counts Adam's two moments of the first rank, which has the least padding.
            held += 8 * sum(len(u.spec.layout.shard_range(0)) - u.owned_numel for u in state.units)
            sizes_of = [[u.layout.padded_numel for u in p.units] for p in (state.plan, run.plan)]
            parallel_assert(comm, sizes_of[0] == sizes_of[1], f"{layout}: {sizes_of}")
            least, most = run.moments.step, run.most
            parallel_assert(comm, least <= held <= most, f"{layout}: {least} {held} {most}")
            parallel_assert(comm, least > most / 20, f"{layout}: {least} {most}")
            hpczero.release(model)
            close(model)


def test_a_part_is_refused_where_it_does_not_fit_and_not_where_the_whole_would_not(
    comm: MPI.Intracomm,
) -> None:
    whole = ParallelOptions(stage=0)
    with laid_out(comm, whole) as topology:
        everything = planned(topology, whole, XL)
    for layout in LAYOUTS[comm.size]:
        if layout.get("shard") or layout.get("context"):
            continue  # at stage 0 each rank has everything
        parallel = ParallelOptions(stage=0, **layout)
        with laid_out(comm, parallel) as topology:
            run = planned(topology, parallel, XL)
            lows = comm.allgather(float(max(vars(run.moments).values())))
            own = sum(comm.allgather(usage().resident))
            check = RoomCheck(topology, HostAccelerator(), title="gpt2-xl")

            def room(nbytes: float) -> list[Room]:
                return [Room("the memory of this test", "one host", "resident", int(nbytes), 0)]

            fits = own * 1.2 + sum(lows)
            parallel_assert(comm, fits < comm.size * max(vars(everything.moments).values()))
            check.check(run, room(fits))
            with pytest.raises(ConfigError) as caught:
                check.check(run, room(own + sum(lows) * 0.7))
            name, value = next(iter(layout.items()))
            for said in (
                "1,557,611,200 parameters",
                f"{name} {value}",
                f"--parallel.{name} {value}",
                "the memory of this test",
            ):
                parallel_assert(comm, said in str(caught.value), f"{said!r}: {caught.value}")


def test_stages_of_one_host_are_counted_each_by_its_own_part(comm: MPI.Intracomm) -> None:
    parallel = ParallelOptions(stage=1, pipeline=comm.size)
    with laid_out(comm, parallel) as topology:
        run = planned(topology, parallel, XL)
        parallel_assert(comm, run.near == tuple(range(comm.size)))
        seen = [dataclasses.replace(run, place=p).plan.numel for p in run.near]
        parallel_assert(comm, seen == comm.allgather(run.plan.numel), f"{seen}")
        parallel_assert(comm, len(set(seen)) > 1, "stages of equal size show nothing")


def test_the_header_says_who_shares_what_and_what_is_sent(comm: MPI.Intracomm) -> None:
    parallel = ParallelOptions(stage=1, pipeline=2)
    with laid_out(comm, parallel) as topology:
        run = planned(topology, parallel)
        lines = "\n".join(describe_layout(run))
        for said in (
            f"{comm.size} rank(s) on 1 node(s): pipeline 2",
            "pipeline: 1f1b, 3 micro batches over 2 stages: idle for 33%",
        ):
            parallel_assert(comm, said in lines, lines)
        sent = describe_sent(run)
        parallel_assert(comm, re.search(r"pipeline \d", sent) is not None, sent)
        batch = Batch.resolve(TrainOptions(micro_batch=2, accumulation=3), topology.data.size)
        said = describe_run(RunConfig(), batch, 12, topology.data)
        data = comm.size // 2
        expected = f"{6 * data * 12} tokens = micro batch 2 x accumulation 3 x {data} data parallel"
        parallel_assert(comm, expected in said, said)
