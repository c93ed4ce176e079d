"""Whether a node has room for what tiers hold there, and that a device need not hold it."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.accelerator import HostAccelerator
from hpczero.job.limits import Room
from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig
from hpczero.options.config import ActivationOptions, ModelOptions, OffloadOptions, RunConfig
from hpczero.plan.offload import MIB, Medium, Offload
from hpczero.plan.peak import PlannedRun
from hpczero.run.starting import choosing
from hpczero.run.starting.room_check import Bound

MODEL = GPTConfig(vocab_size=512, context=64, layers=8, hidden=256, heads=4)


def resting_on(medium: Medium) -> PlannedRun:
    run = PlannedRun(
        MODEL,
        Mesh(shard=2),
        ranks_per_node=2,
        transport="flat",
        stage=3,
        precision="fp32",
        micro_batch=4,
        accumulation=1,
        checkpointing=True,
        offload=Offload(medium, medium, folder="/scratch", window=MIB),
    )
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
