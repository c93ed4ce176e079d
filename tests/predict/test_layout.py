"""Time of a step of a layout: each part by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpczero.job.mesh import Mesh
from hpczero.models.config import PRESETS, GPTConfig
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job
from hpczero.predict.machine import load_machine
from hpczero.predict.model import Prediction, predict
from hpczero.predict.network import Network

MACHINE = dataclasses.replace(load_machine("dgx-a100"), overlap=1.0)
MODEL = GPTConfig(vocab_size=1024, context=128, layers=8, hidden=512, heads=8)


def predicted(mesh: Mesh, model: GPTConfig = MODEL, **more: Any) -> Prediction:
    return predict(Job.of(Spread(model, mesh, 8, on_device=True, **more), MACHINE))


def test_sums_of_tensor_ranks_are_eight_blocks_to_each_other() -> None:
    found = predicted(Mesh(shard=2, tensor=4), micro_batch=3, accumulation=2)
    block = 3 * 128 * 512 * 2 / 4
    one_way = 3 * (MACHINE.node_latency + block / MACHINE.node_rate)
    assert found.sums_s == pytest.approx(2 * (8 * 4 + 2) * 2 * one_way)
    spread = predicted(Mesh(tensor=16), dataclasses.replace(MODEL, heads=16), micro_batch=3)
    block = 3 * 128 * 512 * 2 / 16
    one_way = 15 * (MACHINE.nic_latency + MACHINE.message_host + block / MACHINE.nic_rate)
    assert spread.sums_s == pytest.approx((8 * 4 + 2) * 2 * one_way)


def test_sequence_parallelism_divides_norms_and_not_the_sums() -> None:
    plain, parallel = (
        predicted(Mesh(shard=2, tensor=4), micro_batch=3, sequence_parallel=on)
        for on in (False, True)
    )
    assert parallel.sums_s == plain.sums_s
    assert parallel.forward_s < plain.forward_s


def test_fill_is_the_turn_of_all_other_stages_over_the_groups() -> None:
    """With one token id the head is nothing, so that all stages but the first are equal."""
    model = dataclasses.replace(MODEL, vocab_size=8, context=512)
    busy = []
    for interleave, schedule in ((1, "1f1b"), (2, "interleaved")):
        found = predicted(
            Mesh(pipeline=4),
            model,
            stage=1,
            accumulation=6,
            schedule=schedule,
            interleave=interleave,
        )
        turns = found.forward_s + found.backward_s + found.messages_s
        assert found.fill_s == pytest.approx(turns * float(found.job.bubble), rel=0.05)
        busy.append(found)
    assert busy[1].fill_s < 0.6 * busy[0].fill_s
    assert busy[1].messages_s > 1.9 * busy[0].messages_s


def test_messages_cross_nodes_where_the_next_stage_is_elsewhere() -> None:
    near = predicted(Mesh(pipeline=2), stage=1, micro_batch=4, accumulation=3)
    nbytes = 4 * 128 * 512 * 2
    assert near.messages_s == pytest.approx(3 * (MACHINE.node_latency + nbytes / MACHINE.node_rate))
    far = predicted(Mesh(pipeline=2, shard=8), stage=1, micro_batch=4, accumulation=3)
    each = MACHINE.nic_latency + MACHINE.message_host
    assert far.messages_s == pytest.approx(3 * (each + nbytes / MACHINE.rail_rate))


def test_stage_3_under_a_pipeline_pays_for_one_gather_a_step() -> None:
    few, many = (
        predicted(Mesh(pipeline=2, shard=16), stage=3, accumulation=times) for times in (4, 16)
    )
    assert few.communication_s == pytest.approx(many.communication_s)
    assert many.forward_s == pytest.approx(4 * few.forward_s)


def test_second_shard_saves_time_between_nodes_and_replicas_too() -> None:
    model = PRESETS["gpt2-xl"]
    plain, second = (
        predicted(Mesh(shard=64), model, stage=3, secondary=on) for on in (False, True)
    )
    assert second.communication_s + second.hidden_s < plain.communication_s + plain.hidden_s
    replicas = predicted(Mesh(replicate=8, shard=8), model, stage=3)
    shard = sum(unit.layout.shard_numel for unit in replicas.job.plan.units)
    travel = 2 * 7 * shard / 8 * 4 / MACHINE.rail_rate
    units = len(replicas.job.plan.units)
    own = replicas.replicas_s - travel
    # each unit: a latency of a reduction and of a gather, and the host's time of seven messages each way
    least = units * 2 * (MACHINE.nic_latency + MACHINE.round_host)
    assert least < own < least + units * 5 * (MACHINE.round_host + 2 * MACHINE.sum_host)


def test_parts_of_a_step_add_up() -> None:
    found = predicted(
        Mesh(pipeline=2, replicate=2, shard=2, sequence=2, tensor=2),
        stage=1,
        micro_batch=2,
        accumulation=4,
    )
    parts = [
        value
        for name, value in vars(found).items()
        if name.endswith("_s") and name not in ("hidden_s", "tier_hidden_s", "host_s")
    ]
    assert len(parts) == 10
    assert found.step_s == pytest.approx(sum(parts))
    assert found.job.global_batch == 2 * 4 * 4
    assert found.tokens_per_s == pytest.approx(32 * 128 / found.step_s)


@pytest.mark.parametrize(("precision", "late"), [("bf16", True), ("fp32", False)])
def test_in_half_precision_the_next_forward_hides_the_gathers_of_the_update(
    precision: str, late: bool
) -> None:
    job = Job.plain(MODEL, MACHINE, 8, 1, precision, 1, transport="ipc")
    network = Network(job)
    gathers = [
        network.gather(u.layout.shard_numel * (2 if late else 4)).seconds for u in job.plan.units
    ]
    hours = 1e4  # of computing in each block, which hide whatever can be hidden
    found = network.exchanged(hours, hours, hours)
    exposed, whole = found.exposed_s, found.cost.seconds
    assert whole - exposed > 0
    # Nothing runs before the first two, and the reductions that nothing hides are those of the last two units.
    reduced = [
        network.reduce(job.plan.units[place].layout.shard_numel).seconds for place in (0, -1)
    ]
    expected = sum(gathers[:2] if late else gathers) + sum(reduced)
    assert exposed - expected == pytest.approx(
        whole - sum(gathers) - _reductions(network), rel=1e-9
    )


def _reductions(network: Network) -> float:
    return sum(network.reduce(unit.layout.shard_numel).seconds for unit in network.job.plan.units)
