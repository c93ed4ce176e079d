"""A run compared with the memory there is: what is refused, what is said to fit, and a real run under real limits."""

from __future__ import annotations

import dataclasses
import math
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpczero.accelerator import HostAccelerator
from hpczero.errors import ConfigError, OutOfMemory
from hpczero.job.limits import ProcessMemory, Room, usage
from hpczero.job.topology import Topology
from hpczero.models import PRESETS, GPTConfig, parameter_shapes
from hpczero.options.config import ActivationOptions, ModelOptions, OffloadOptions, RunConfig
from hpczero.plan import spread
from hpczero.plan.alternatives import alternatives, describe
from hpczero.plan.offload import MIB, Medium, Offload
from hpczero.plan.peak import PlannedRun
from hpczero.plan.plan import Plan
from hpczero.plan.sizing import blockwise_plan
from hpczero.run.starting import choosing
from hpczero.run.starting.room_check import Bound, RoomCheck, gather_bounds
from tests.helpers.mpirun import run_command
from tests.helpers.planned import planned

XL = PRESETS["gpt2-xl"]
RUN = planned(XL, stage=0)


@pytest.fixture
def alone() -> Iterator[Topology]:
    topology = Topology.alone()
    yield topology
    topology.free()


def test_everything_said_to_fit_fits_and_trains_the_same_batch() -> None:
    for limit in (45e9, 20e9, 8e9):

        def fits(run: PlannedRun, limit: float = limit) -> bool:
            return run.most <= limit

        found = alternatives(RUN, fits, cores=4)
        assert found
        for other in found:
            assert other.run.most <= limit
            assert other.run != RUN
            if other.run.ranks <= RUN.global_batch:
                assert other.run.global_batch == RUN.global_batch
    assert alternatives(RUN, lambda run: False, cores=4) == []


def test_another_stage_a_smaller_micro_batch_and_checkpointing_are_each_named_if_they_fit() -> None:
    run = dataclasses.replace(RUN, stage=2)
    least = max(
        dataclasses.replace(run, **change).most
        for change in ({"micro_batch": 2, "accumulation": 2}, {"checkpointing": True})
    )
    words = [found.words for found in alternatives(run, lambda r: r.most <= least, cores=2)]
    assert any("--train.micro_batch 2 --train.accumulation 2" in text for text in words)
    assert any("--model.checkpoint_activations true" in text for text in words)


def test_a_model_three_times_the_memory_is_told_what_fits_from_disk() -> None:
    run = dataclasses.replace(RUN, stage=3, micro_batch=1, sequence=128, checkpointing=True)
    assert run.most > 10e9
    (found, *_) = alternatives(run, lambda run: run.most <= 3e9, cores=2)
    assert found.run.offload.parameters == "disk"
    assert found.run.most < 3e9
    options = [f"--offload.{part} disk" for part in ("optimizer", "gradients", "parameters")]
    assert " ".join([*options, "--offload.folder FOLDER"]) in found.words
    # Memory of the host is the same memory where there is no device.
    on_host = dataclasses.replace(run, offload=Offload("host", "host", "host"))
    assert on_host.most > found.run.most + 16 * run.plan.numel / 2


def test_the_end_of_a_run_takes_one_unit_and_not_the_whole_model() -> None:
    run = dataclasses.replace(RUN.on(64, 64), stage=3, transport="flat")
    nbytes = {name: 4 * math.prod(shape) for name, shape in parameter_shapes(XL)}
    table = nbytes["wte.weight"]  # in the largest unit, with little else
    beside = run.moments.end - (run.moments.step - run.memory.gradients)
    assert table <= beside < 1.1 * table
    assert beside < sum(nbytes.values()) / 10


def test_low_estimates_lie_below_high_ones_for_every_kind_of_room() -> None:
    for stage in range(4):
        for transport in ("flat", "window"):
            run = dataclasses.replace(RUN, stage=stage, transport=transport)
            for kind in ("resident", "mapped", "private", "shared"):
                bound = Bound(Room("x", "host", kind, 1, 0), 2, own=0.0)
                assert bound.least(run) <= bound.most(run), (stage, transport, kind)


def test_memory_that_runs_out_inside_a_run_says_what_the_plan_needs(alone: Topology) -> None:
    run = dataclasses.replace(RUN.on(1, 1), model=PRESETS["gpt-micro"], transport="flat")
    check = RoomCheck(alone, HostAccelerator(), title="gpt-micro")
    check.check(run, [])
    said = r"can't allocate .*stage 0 on 1 rank.*hpczero.plan --"
    with pytest.raises(OutOfMemory, match=said), check:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: tried 9 bytes")
    room = Room("a limit", "host", "resident", 2**20, 0)
    said = r"gpt-micro .* needs .* this host, which has 1 MB \(a limit\)"
    with pytest.raises(ConfigError, match=said):
        RoomCheck(alone, HostAccelerator(), title="gpt-micro").check(run, [room])


@pytest.mark.slow
def test_the_deepest_model_is_refused_after_a_few_plans_of_it(
    alone: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = dataclasses.replace(PRESETS["gpt-nano"], layers=2000, hidden=64, heads=4)
    plans = []

    def counted(*args: Any, **kwargs: Any) -> Plan:
        plans.append(kwargs)
        return blockwise_plan(*args, **kwargs)

    monkeypatch.setattr(spread, "blockwise_plan", counted)
    run = dataclasses.replace(RUN.on(1, 1), model=deep, transport="flat")
    check = RoomCheck(alone, HostAccelerator(), title="gpt-nano")
    for limit, most in ((10**9, 80), (10**8, 40)):  # the second is less than a process takes
        del plans[:]
        with pytest.raises(ConfigError):
            check.check(run, [Room("x", "host", "resident", limit, 0)])
        assert len(plans) < most


def test_more_ranks_are_said_with_the_batch_and_the_nodes_that_they_need() -> None:
    run = dataclasses.replace(RUN.on(1, 1), transport="flat", stage=3, micro_batch=1, laid_out=True)
    two = dataclasses.replace(run.on(2, 2), transport="window")
    words = describe(run, two)
    assert "--train.micro_batch 1 --train.global_batch 2" in words
    assert "--parallel.nodes 1x2" in words


def test_a_smaller_preset_is_said_without_the_sizes_that_were_given(alone: Topology) -> None:
    run = dataclasses.replace(RUN.on(1, 1), transport="flat")
    room = Room("x", "host", "resident", usage().resident + int(1.5e9), 0)
    given = ["hidden", "checkpoint_activations", "layers"]
    check = RoomCheck(alone, HostAccelerator(), title="gpt2-xl", overridden=given)
    said = r"--model.preset gpt-nano without --model.hidden, --model.layers\)"
    with pytest.raises(ConfigError, match=said):
        check.check(run, [room])


@pytest.mark.mpi(min_size=2)
def test_a_limit_of_one_rank_alone_does_not_hide_what_ranks_have_together(
    topology: Topology,
) -> None:
    alone = [Room("ulimit", "", "mapped", 10**12, 0)] * (topology.rank == 1)
    shared = Room("memory", "host", "resident", 10**10, 0)
    own = ProcessMemory(resident=10 + topology.rank, of_files=0, mapped=7, private=0)
    bounds = gather_bounds([*alone, shared], own, topology)
    assert bounds[-1].members == topology.size
    assert bounds[-1].own == sum(10 + rank for rank in range(topology.size))
    assert [(b.members, b.own) for b in bounds[:-1]] == [(1, 7)] * len(alone)


@pytest.mark.mpi(min_size=2)
def test_what_does_not_fit_under_the_limit_of_one_rank_is_refused_on_every_rank(
    topology: Topology,
) -> None:
    run = dataclasses.replace(RUN.on(topology.size, topology.size), stage=3)
    found = [Room("ulimit -v", "", "mapped", 10**9, 0)] * (topology.rank == 1)
    check = RoomCheck(topology, HostAccelerator(), title="gpt2-xl")
    with pytest.raises(ConfigError, match=r"rank.s. 1, .*in this process, which has 1.0 GB"):
        check.check(run, found)


@pytest.mark.slow
def test_a_run_beyond_its_address_space_is_refused_before_any_allocation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpczero.train", "--run.folder", str(tmp_path)]
    command += ["--data.cache", str(tmp_path), "--data.path", str(tmp_path / "text.txt")]
    command += ["--model.preset", "gpt2-xl", "--model.context", "64"]
    (tmp_path / "text.txt").write_text("some words to train on " * 1000)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (7 * 10**9, limit[1]))
    try:
        done = run_command(command, timeout=100).ended(78)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "ulimit -v" in done.stderr
    needed = re.search(r"needs ([\d.]+) GB", done.stderr)
    assert needed is not None
    assert 20 < float(needed[1]) < 40  # 16 bytes of a parameter
    fits = r"stage 3 on \d+ ranks \(\d+ nodes of 1 like this one\).* would fit"
    assert re.search(fits, done.stderr)
    (asked,) = re.findall(r"More: (python -m hpczero.plan .*)", done.stderr)
    answer = run_command([sys.executable, *asked.split()[1:]], timeout=60).ended()
    assert "1,47" in answer.stdout  # the very model, with the vocabulary of bytes


def test_an_own_loop_whose_memory_runs_out_is_told_what_the_plan_needs() -> None:
    program = """
import resource, torch, hpczero
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
pages = int(open("/proc/self/statm").read().split()[0]) + 2 ** 15
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
model = hpczero.zeroify(model, optimizer, stage=2)
model(torch.randn(4, 2048)).sum().backward()
optimizer.step()
"""
    done = run_command([sys.executable, "-c", program], timeout=100).ended(1)
    said = "out of memory: 33,570,816 parameters at stage 2 on 1 rank(s) take 0.54 GB"
    assert said in done.stderr
    assert "python -m hpczero.plan --memory" in done.stderr
    assert "Traceback" in done.stderr  # the allocator's own error is there too


# --- what rests elsewhere


def resting_on(medium: Medium) -> PlannedRun:
    model = GPTConfig(vocab_size=512, context=64, layers=8, hidden=256, heads=4)
    offload = Offload(medium, medium, folder="/scratch", window=MIB)
    run = planned(model, transport="flat", checkpointing=True, offload=offload)
    kept = dataclasses.replace(run.kept, checkpointing="block", rest=medium, folder="/scratch")
    return dataclasses.replace(run, kept=kept)


@pytest.mark.parametrize("medium", ["host", "disk"])
def test_a_medium_holds_shards_and_inputs_of_all_ranks_of_the_node_or_is_too_small(
    medium: Medium,
) -> None:
    run = resting_on(medium)
    asked = 2 * (run.memory.away + run.inputs_away)
    assert choosing.TierRoom({medium: asked}).holds(run, 2)
    assert not choosing.TierRoom({medium: asked - 1}).holds(run, 2)
    other: Medium = "host" if medium == "disk" else "disk"
    assert choosing.TierRoom({other: 0}).holds(run, 2)


def test_a_device_need_not_hold_what_rests_on_the_host() -> None:
    bound = Bound(Room("the device", "device 0", "device", 10**12, 0), 1, 0.0)
    host, disk = resting_on("host"), resting_on("disk")
    assert host.tiered > 0
    assert bound.most(host) == bound.most(disk)
    assert bound.least(host) == bound.least(disk)
    node = Bound(Room("the node", "node", "resident", 10**12, 0), 1, 0.0)
    assert node.most(host) == node.most(disk) + host.tiered


def test_what_is_given_is_left_as_it_is() -> None:
    folder = OffloadOptions(folder="/scratch")
    free = choosing.freedom_of(RunConfig(offload=folder), HostAccelerator())
    assert (free.media, free.rests, free.fractions) == (["disk"], ["disk"], True)
    given = dataclasses.replace(folder, optimizer="disk")
    assert not choosing.freedom_of(RunConfig(offload=given), HostAccelerator()).fractions
    for asked in (
        RunConfig(offload=folder, model=ModelOptions(checkpoint_activations=True)),
        RunConfig(offload=folder, activations=ActivationOptions("selective")),
    ):
        free = choosing.freedom_of(asked, HostAccelerator())
        assert (free.checkpointing, free.rests) == ((True,), [])
    inputs = RunConfig(activations=ActivationOptions(folder="/scratch"))
    free = choosing.freedom_of(inputs, HostAccelerator())
    assert (free.media, free.rests, free.folder) == ([], ["disk"], "/scratch")
    assert choosing.freedom_of(RunConfig(), HostAccelerator()).rests == []
