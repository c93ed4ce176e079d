"""What memory tiers add to a predicted step: bytes as the plan counts them, over rates made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpczero.models.config import GPTConfig
from hpczero.plan.offload import Activations, Offload
from hpczero.plan.offloaded import cuts
from hpczero.predict.job import Job, sides_of
from hpczero.predict.machine import load_machine
from hpczero.predict.model import moved_of, predict

MODEL = GPTConfig(vocab_size=512, context=64, layers=6, hidden=128, heads=2)
SLOW = 1e6  # bytes per second: nothing hides it
ON_DISK = Activations("block", "disk", "/scratch")


def job(**changes: object) -> Job:
    rates: dict[str, Any] = {
        "disk_read": SLOW,
        "disk_write": 2 * SLOW,
        "host_read": 4 * SLOW,
        "host_write": SLOW,
    }
    machine = dataclasses.replace(load_machine("dgx-h100"), **rates)
    asked = Job.plain(MODEL, machine, 2, 3, "fp32", 2, transport="window", ranks_per_node=2)
    return dataclasses.replace(asked, **changes)  # type: ignore[arg-type]


def with_host(asked: Job, update: float = 1e7) -> Job:
    return dataclasses.replace(
        asked, machine=dataclasses.replace(asked.machine, host_update=update)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("step", ["device", "host"])
def test_bytes_of_a_foretold_step_are_those_of_the_plan_at_every_fraction(
    precision: str, step: Any
) -> None:
    for parts in (Offload("host"), Offload("host", "host"), Offload("host", "host", "host")):
        for fraction in cuts([1] * (MODEL.layers + 1)):
            offload = dataclasses.replace(parts, fraction=fraction, step=step)
            plan = job(offload=offload, precision=precision).offloaded
            moved = moved_of(plan)
            whole = plan.traffic()
            assert 2 * moved.gathered + moved.step.read_nbytes == whole.read_nbytes
            assert moved.reduced + moved.step.written_nbytes == whole.written_nbytes
            accumulated = plan.traffic(micro_steps=3, synced=1)
            assert accumulated.nbytes - whole.nbytes == 2 * 2 * moved.gathered


def test_units_that_stay_take_no_time_of_the_medium() -> None:
    times = []
    for fraction in (1.0, 0.6, 0.2):
        asked = job(offload=Offload("disk", "disk", "disk", "/scratch", fraction=fraction))
        bytes_ = asked.offloaded.traffic()
        alone = bytes_.read_nbytes / SLOW + bytes_.written_nbytes / (2 * SLOW)
        step = predict(asked)
        assert step.tier_s == pytest.approx(alone, rel=0.05)
        assert step.tier_s + step.tier_hidden_s == pytest.approx(alone, rel=0.01)
        times.append(step.tier_s)
    assert times == sorted(times, reverse=True)
    assert predict(job(offload=Offload("disk", folder="/scratch", fraction=0.0))).tier_s == 0


def test_all_inputs_of_blocks_but_the_newest_are_written_and_read_in_every_forward() -> None:
    for accumulation in (1, 3):
        asked = job(checkpointing=True, kept=ON_DISK, accumulation=accumulation)
        each = 2 * MODEL.context * MODEL.hidden * 4
        assert asked.inputs_away == (MODEL.layers - 1) * each
        alone = accumulation * asked.inputs_away * (1 / SLOW + 1 / (2 * SLOW))
        step = predict(asked)
        assert step.tier_s + step.tier_hidden_s == pytest.approx(alone, rel=0.01)
        assert step.tier_s == pytest.approx(alone, rel=0.05)
    assert predict(job(checkpointing=True)).tier_s == 0
    assert predict(job(kept=ON_DISK)).tier_s == 0  # nothing is computed again


def test_a_disk_as_fast_as_computing_hides_inputs_of_blocks() -> None:
    quick = dataclasses.replace(job().machine, disk_read=1e12, disk_write=1e12)
    asked = job(machine=quick, checkpointing=True, kept=ON_DISK)
    step = predict(asked)
    copies = 2 * asked.inputs_away * 2 / quick.memory_rate
    assert step.tier_s == pytest.approx(copies)
    assert step.tier_hidden_s < step.forward_s + step.backward_s


def test_inputs_and_shards_share_a_medium_or_work_beside_each_other() -> None:
    shards = Offload("disk", "disk", "disk", "/scratch")
    one, other = job(offload=shards), job(checkpointing=True, kept=ON_DISK)
    both = job(offload=shards, checkpointing=True, kept=ON_DISK)
    apart = dataclasses.replace(both, kept=dataclasses.replace(ON_DISK, rest="host"))
    alone = [predict(asked).tier_s for asked in (one, other)]
    assert predict(both).tier_s == pytest.approx(sum(alone), rel=0.05)
    assert predict(one).tier_s - 0.1 < predict(apart).tier_s < predict(both).tier_s


def test_a_step_on_the_host_sends_values_alone_and_takes_what_its_slower_side_takes() -> None:
    offload = Offload("host", "host", step="host")
    asked = with_host(job(offload=offload))
    owned = sum(unit.layout.shard_numel for unit in asked.plan.units)
    assert predict(asked).update_s == pytest.approx(owned / 1e7)
    part = dataclasses.replace(asked, offload=dataclasses.replace(offload, fraction=0.1))
    away = sum(unit.layout.shard_numel for unit in part.offloaded.away)
    assert predict(part).update_s == pytest.approx(away / 1e7)
    moved = moved_of(asked.offloaded)
    assert (moved.step.read_nbytes, moved.step.written_nbytes) == (4 * owned, 0)
    copied = with_host(job(offload=dataclasses.replace(offload, step="device")))
    assert predict(copied).update_s == predict(job()).update_s
    assert predict(copied).tier_s > predict(asked).tier_s


def test_both_sides_of_an_update_end_together_at_the_balance() -> None:
    asked = with_host(job())
    sides = sides_of(asked.machine, asked.work, up=4)
    assert sides is not None
    fraction = sides.balance
    assert fraction * sides.host_s == pytest.approx((1 - fraction) / sides.device)
    assert sides_of(job().machine, asked.work, up=4) is None  # no host is known


def test_without_a_host_beside_the_device_whoever_computes_takes_the_whole_update() -> None:
    offload = Offload("host", "host", step="host")
    assert predict(job(offload=offload)).update_s == predict(job()).update_s
