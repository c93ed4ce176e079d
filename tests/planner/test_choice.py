"""The planner's candidates and its choice, by hand-made seconds and bytes; what a tier adds to a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from hpczero.plan.offload import Offload
from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import Freedom, candidates, choose, describe, lines, options_of
from hpczero.planner.search import prediction_on
from hpczero.predict.machine import Machine, load_machine
from hpczero.predict.model import Prediction
from tests.helpers.planned import planned

MODEL = GPTConfig(vocab_size=512, context=64, layers=4, hidden=128, heads=2)
DISK = Freedom(media=["disk"], folder="/scratch")


def asked(**changes: object) -> PlannedRun:
    return planned(MODEL, **{"micro_batch": 6, **changes})


def machine(**changes: object) -> Machine:
    sheet = dataclasses.replace(load_machine("dgx-h100"), disk_read=1e9, disk_write=2e9)
    return dataclasses.replace(sheet, **changes)  # type: ignore[arg-type]


def test_every_candidate_keeps_the_global_batch_and_can_be_trained() -> None:
    found = list(candidates(asked(), DISK))
    assert {run.global_batch for run in found} == {12}
    batches = {(run.micro_batch, run.accumulation) for run in found}
    assert batches == {(6, 1), (3, 2), (2, 3), (1, 6)}
    for run in found:
        run.offload.check(run.plan.stage)
    assert {run.stage for run in found if not run.offload.any} == {0, 1, 2, 3}
    assert len({dataclasses.astuple(run)[3:] for run in found}) == len(found)


def test_what_is_given_is_kept() -> None:
    free = Freedom(stages=(2,), checkpointing=(True,), micro_batches=False)
    (only,) = candidates(asked(micro_batch=3, accumulation=2), free)
    assert (only.stage, only.checkpointing, only.micro_batch, only.accumulation) == (2, True, 3, 2)
    given = asked(offload=Offload("disk", folder="/scratch"))
    assert {run.offload for run in candidates(given, DISK)} == {given.offload}


def in_seconds(seconds: Callable[[PlannedRun], float]) -> Callable[[PlannedRun], Prediction]:
    """A prediction that each run takes so long."""

    def prediction_of(run: PlannedRun) -> Prediction:
        others = ("backward_s", "communication_s", "update_s", "tier_s")
        nothing: dict[str, Any] = dict.fromkeys(others, 0.0)
        base = prediction_on(machine())(run)
        return dataclasses.replace(base, forward_s=seconds(run), **nothing)

    return prediction_of


def test_the_fastest_that_fits_is_chosen_and_what_would_be_faster_is_named() -> None:
    stages = {0: 1.0, 1: 3.0, 2: 2.0, 3: 4.0}
    prediction_of = in_seconds(
        lambda run: stages[run.stage] + run.accumulation / 10 + run.checkpointing / 2
    )
    runs = list(candidates(asked(), Freedom()))
    choice = choose(runs, lambda run: run.stage > 0, prediction_of)
    assert choice.best is not None
    assert choice.runner_up is not None
    assert choice.too_large is not None
    assert (choice.best.run.stage, choice.best.run.micro_batch) == (2, 6)
    assert (choice.runner_up.run.stage, choice.runner_up.run.checkpointing) == (2, True)
    assert choice.too_large.run.stage == 0
    assert choice.tried == len(runs)
    said = "\n".join(lines(choice))
    assert "stage 0, micro-batch 6: 1.10 s" in said
    assert "does not fit" in said
    nothing = choose(runs, lambda run: False, prediction_of)
    assert (nothing.best, nothing.runner_up) == (None, None)


def test_settings_alike_within_a_hundredth_go_to_the_simpler_one() -> None:
    # So little is noise
    prediction_of = in_seconds(lambda run: 0.995 if run.offload.any else 1.0)
    choice = choose(candidates(asked(), DISK), lambda run: True, prediction_of)
    assert choice.best is not None
    best = choice.best.run
    assert not best.offload.any
    assert (best.stage, best.checkpointing, best.accumulation) == (0, False, 1)


def test_options_pin_the_choice() -> None:
    offload = Offload("disk", "disk", folder="/scratch")
    run = asked(stage=2, micro_batch=3, accumulation=2, checkpointing=True, offload=offload)
    assert options_of(run) == [
        "--parallel.stage 2",
        "--train.micro_batch 3",
        "--train.accumulation 2",
        "--model.checkpoint_activations true",
        "--offload.optimizer disk",
        "--offload.gradients disk",
        "--offload.folder /scratch",
    ]
    given = Offload("host", "host", fraction=0.5, step="host", window=2**20, buffers=4)
    assert options_of(asked(stage=2, offload=given))[-4:] == [
        "--offload.fraction 0.5",
        "--offload.step host",
        "--offload.buffers 4",
        "--offload.window 1",
    ]
    found = choose([run], lambda _: True, prediction_on(machine())).best
    assert found is not None
    assert "optimizer and gradients on disk" in describe(found)


def test_a_disk_that_is_slower_than_computing_sets_the_step() -> None:
    """Section 5 of ZeRO-Infinity: 40 bytes of everything for each element that a rank owns."""
    offload = Offload("disk", "disk", "disk", Path("/scratch"))
    run = asked(offload=offload)
    slow = machine(disk_read=1e6, disk_write=1e6)
    step = prediction_on(slow)(run)
    shard = sum(unit.layout.shard_numel for unit in run.plan.units)
    assert step.tier_s == pytest.approx(40 * shard / 1e6, rel=0.05)
    assert step.tier_s > 40 * shard / 1e6 - step.forward_s - step.backward_s - step.update_s
    fast = prediction_on(machine(disk_read=1e15, disk_write=1e15))(run)
    assert fast.tier_s < 0.01 * step.tier_s
    assert prediction_on(slow)(asked()).tier_s == 0


def test_passes_in_half_precision_read_half_of_the_bytes() -> None:
    """38 bytes of everything, and 4 of them again with each further micro-batch."""
    offload = Offload("disk", "disk", "disk", Path("/scratch"))
    slow = machine(disk_read=1e6, disk_write=1e6)
    run = asked(offload=offload, precision="bf16")
    shard = sum(unit.layout.shard_numel for unit in run.plan.units)
    once = prediction_on(slow)(run).tier_s
    assert once == pytest.approx(38 * shard / 1e6, rel=0.05)
    again = prediction_on(slow)(dataclasses.replace(run, micro_batch=2, accumulation=3)).tier_s
    assert again - once == pytest.approx(8 * shard / 1e6, rel=0.05)


def test_options_that_only_go_with_some_media_leave_out_the_others() -> None:
    given = asked(offload=Offload(step="host", folder="/scratch"))
    free = Freedom(media=["host", "disk"], folder="/scratch")
    found = list(candidates(given, free))
    assert {run.offload.medium for run in found} == {"device", "host"}
    for run in found:
        run.offload.check(run.plan.stage)


def test_a_tier_without_rates_is_refused_by_name() -> None:
    run = asked(offload=Offload("disk", folder="/scratch"))
    with pytest.raises(ConfigError, match="disk_read and disk_write"):
        prediction_on(load_machine("dgx-h100"))(run)
