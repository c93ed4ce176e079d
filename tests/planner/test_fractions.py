"""A part of the units on a tier, the host's step, inputs of blocks elsewhere: what is tried, and its exact bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hpczero.job.mesh import Mesh
from hpczero.models import PRESETS
from hpczero.models.config import GPTConfig
from hpczero.options.reading import read_run_config
from hpczero.plan.footprint import footprint_of
from hpczero.plan.offload import MIB, Offload
from hpczero.plan.offloaded import OffloadedPlan, cuts, units_away
from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import (
    Choice,
    Freedom,
    Predicted,
    candidates,
    describe,
    kind_of,
    lines,
    options_of,
)
from hpczero.planner.search import balance_on, least_units, prediction_on, search, sizes_of
from hpczero.predict.machine import Machine, load_machine
from hpczero.predict.model import Prediction
from hpczero.run.starting.precheck import activations_of, offload_of
from tests.helpers.planned import planned

MODEL = GPTConfig(vocab_size=4096, context=256, layers=12, hidden=512, heads=8)
SMALL = Offload(window=MIB)  # blocks of staging that a small model can save by
EVERYWHERE = Freedom(media=["host", "disk"], rests=["host", "disk"], folder="/scratch")
DISK = Freedom(media=["disk"], rests=["disk"], folder="/scratch")


def asked(model: GPTConfig = MODEL, **changes: object) -> PlannedRun:
    return planned(model, **{"micro_batch": 8, "offload": SMALL, **changes})


def machine() -> Machine:
    disk: dict[str, Any] = {"disk_read": 1e9, "disk_write": 2e9}
    host: dict[str, Any] = {"host_read": 2e10, "host_write": 2e10, "host_memory": 1e12}
    return dataclasses.replace(load_machine("dgx-h100"), host_update=1e9, **disk, **host)


def within(limit: float, run: PlannedRun) -> bool:
    return run.most <= limit


def on_device(nbytes: float) -> Callable[[PlannedRun], bool]:
    return lambda run: run.most - run.tiered <= nbytes


def found(run: PlannedRun, freedom: Freedom, nbytes: float, model: GPTConfig = MODEL) -> Choice:
    balance = balance_on(run, machine())
    prediction_of = prediction_on(machine())
    return search(run, freedom, prediction_of, fits=on_device(nbytes), balance=balance)


def tight(run: PlannedRun, share: float, freedom: Freedom = DISK) -> float:
    """A limit between what the smallest whole candidate holds and what stage 3 in memory does."""
    most = [one.most - one.tiered for one in candidates(run, freedom)]
    return min(most) + share * (run.most - min(most))


def parts(choice: Choice) -> list[PlannedRun]:
    return [one.run for one in choice.fitting if one.run.offload.fraction < 1]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_the_least_part_that_fits_is_tried(share: float) -> None:
    limit = tight(asked(), share)
    tried = [run for run in parts(found(asked(), DISK, limit)) if not run.offload.on_host]
    assert tried
    for run in tried:
        assert run.most <= limit
        whole = dataclasses.replace(run, offload=dataclasses.replace(run.offload, fraction=1.0))
        count = units_away(sizes_of(run), run.offload.fraction)
        assert 0 < count == least_units(whole, partial(within, limit)) < len(sizes_of(run))


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("vocab_size", [256, 50257])
@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
def test_halving_finds_the_part_that_counting_units_finds(
    ranks: int, vocab_size: int, transport: str
) -> None:
    model = dataclasses.replace(MODEL, vocab_size=vocab_size)
    shared = {"mesh": Mesh(shard=ranks), "ranks_per_node": ranks, "transport": transport}
    whole = Offload("disk", folder="/scratch", window=MIB)
    all_of_it = dataclasses.replace(whole, gradients="disk", parameters="disk")
    for stage, offload in ((1, whole), (3, whole), (3, all_of_it)):
        run = asked(model, stage=stage, offload=offload, **shared)
        sizes = sizes_of(run)

        def held(count: int, run: PlannedRun = run, sizes: list[int] = sizes) -> int:
            fraction = cuts(sizes)[count]
            away = dataclasses.replace(run.offload, fraction=fraction) if count else Offload()
            return dataclasses.replace(run, offload=away).most

        most = [held(count) for count in range(len(sizes) + 1)]
        for limit in sorted({*most, min(most) - 1, (most[1] + most[-1]) // 2}):
            counted = next((n for n, nbytes in enumerate(most) if nbytes <= limit), len(most))
            assert least_units(run, partial(within, limit)) == counted


def test_bytes_of_a_part_are_those_that_the_plan_counts() -> None:
    for run in parts(found(asked(), DISK, tight(asked(), 0.3))):
        plan = OffloadedPlan(run.plan, run.offload)
        held = plan.memory(footprint_of("window", ranks=2, local_size=2))
        assert run.memory == held
        assert run.memory.away == plan.nbytes == run.resting("disk") - run.inputs_away
        assert len(plan.away) == units_away(sizes_of(run), run.offload.fraction)


def test_a_part_is_tried_only_where_all_of_it_in_memory_does_not_fit() -> None:
    everything = found(asked(), DISK, 1e12)
    assert parts(everything) == []
    assert any(one.run.offload.any for one in everything.fitting)
    resident = on_device(tight(asked(), 0.4))
    for run in parts(found(asked(), DISK, tight(asked(), 0.4))):
        assert not resident(dataclasses.replace(run, offload=SMALL))


def test_the_host_steps_on_its_own_memory_with_gradients_there_and_never_late() -> None:
    runs = list(candidates(asked(), EVERYWHERE))
    host = [run.offload for run in runs if run.offload.on_host]
    assert {(one.optimizer, one.gradients) for one in host} == {("host", "host")}
    assert {one.parameters for one in host} == {"device", "host"}
    assert not any(run.offload.delayed for run in runs)
    for run in runs:
        run.offload.check(run.plan.stage)
    without = dataclasses.replace(EVERYWHERE, host_step=False)
    assert not any(run.offload.on_host for run in candidates(asked(), without))


def test_where_everything_fits_the_host_may_take_its_share_of_the_step() -> None:
    shares = parts(found(asked(), EVERYWHERE, 1e12))
    balance = balance_on(asked(), machine())
    assert balance is not None
    assert shares
    for run in shares:
        assert run.offload.on_host
        assert len(run.offloaded.away) == units_away(sizes_of(run), balance)


def test_inputs_of_blocks_rest_elsewhere_where_that_saves_memory() -> None:
    runs = [run for run in candidates(asked(), DISK) if run.kept.away]
    assert {run.kept.rest for run in runs} == {"disk"}
    assert {run.checkpointing for run in runs} == {True}
    here = {kind_of(run)[:2]: run for run in candidates(asked(), DISK) if run.micro_batch == 8}
    for run in runs:
        run.kept.check(on_host=True)
        run.kept.check_saves(inputs=MODEL.layers, input_nbytes=run.input_nbytes)
        assert run.kept.folder == "/scratch"
        if run.micro_batch == 8:
            twin = dataclasses.replace(here[kind_of(run)[:2]], kept=asked().kept)
            assert run.most < dataclasses.replace(twin, checkpointing=True).most
    few = dataclasses.replace(MODEL, layers=3)
    assert not any(run.kept.away for run in candidates(asked(few), DISK))


def test_bytes_of_inputs_are_on_the_disk_or_on_the_host_and_not_on_the_device() -> None:
    run = next(run for run in candidates(asked(), EVERYWHERE) if run.kept.rest == "host")
    each = run.micro_batch * run.length * MODEL.hidden * 4
    assert run.inputs_away == run.tiered == (MODEL.layers - 1) * each
    assert run.resting("disk") == 0
    disk = dataclasses.replace(run, kept=dataclasses.replace(run.kept, rest="disk"))
    assert (disk.tiered, disk.resting("disk")) == (0, run.inputs_away)
    assert disk.most == run.most - run.tiered


def test_a_training_command_with_the_pinned_options_has_the_very_settings() -> None:
    choice = found(asked(), EVERYWHERE, tight(asked(), 0.3))
    some = {kind_of(one.run): one.run for one in choice.fitting}  # one of each kind
    for run in list(some.values())[:12]:
        words = [word for option in options_of(run) for word in option.split(" ")]
        config = read_run_config([*words, "--offload.window", "1"])
        pinned, kept = offload_of(config.offload), activations_of(config)
        if run.offload.any:
            assert dataclasses.replace(pinned, folder=run.offload.folder) == run.offload
            assert pinned.folder == "/scratch" or pinned.medium != "disk"
        assert pinned.any == run.offload.any
        assert (kept.checkpointing != "none", kept.rest) == (run.checkpointing, run.kept.rest)
        assert kept.folder == "/scratch" or kept.rest != "disk"
        assert config.parallel.stage == run.stage
        assert config.train.micro_batch == run.micro_batch


def test_words_say_which_part_who_steps_and_how_much_rests_where() -> None:
    offload = Offload("host", "host", fraction=0.1, step="host")
    kept = dataclasses.replace(asked().kept, checkpointing="block", rest="disk", folder="/scratch")
    run = asked(offload=offload, checkpointing=True, kept=kept)
    said = describe(Predicted(run, prediction_on(machine())(run)))
    away = len(run.offloaded.away)
    assert f"optimizer and gradients of {away} of 13 units on host, stepped on by the host" in said
    assert "activations checkpointed with inputs on disk" in said
    assert " on host and " in said.split("a rank and ")[1]
    assert said.endswith("MB on disk")


def test_the_runner_up_differs_in_more_than_the_part_that_leaves() -> None:
    choice = found(asked(), DISK, tight(asked(), 0.3))
    assert choice.best is not None
    assert choice.runner_up is not None
    assert kind_of(choice.best.run) != kind_of(choice.runner_up.run)
    assert lines(choice)[0].startswith(f"chosen of {choice.tried} settings")


def test_a_model_that_never_fits_has_no_part_that_does() -> None:
    run = asked(offload=dataclasses.replace(SMALL, optimizer="disk", folder="/scratch"))
    assert least_units(run, lambda other: False) == len(sizes_of(run)) + 1
    choice = found(asked(), DISK, 0)
    assert choice.best is None
    assert choice.too_large is not None


def test_everything_at_once_is_searched_by_a_few_questions_of_each_setting() -> None:
    model = PRESETS["gpt2-xl"]
    run = asked(model, micro_batch=64, offload=Offload())
    questions: list[PlannedRun] = []
    predicted: list[PlannedRun] = []

    def fits(run: PlannedRun) -> bool:
        questions.append(run)
        return on_device(1.2e10)(run)

    def prediction_of(run: PlannedRun) -> Prediction:
        predicted.append(run)
        return prediction_on(machine())(run)

    balance = balance_on(run, machine())
    choice = search(run, EVERYWHERE, prediction_of, fits=fits, balance=balance)
    # Three of each and half a second in all; minutes if a search tried every part of 49 units of each.
    assert 700 < choice.tried < 1000
    assert len(questions) < 4 * choice.tried
    assert len(predicted) == choice.tried, "each once"
    assert choice.best is not None
    assert found(run, EVERYWHERE, 1.2e10, model) == choice
