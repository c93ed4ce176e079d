"""``--parallel.auto`` and ``plan --auto``: real runs that choose their settings, and go on with what they chose."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml
from tests.helpers.mpirun import Finished, run_alone, run_ranks, run_typed
from tests.helpers.runs import losses, options
from tests.helpers.short_probe import SHORT_PROBE

PLAN = ["-m", "hpczero.plan", "--auto", "--layers", "2", "--hidden", "64", "--vocab", "256"]
PLAN += ["--sequence", "32", "--global-batch", "4"]


def train(folder: Path, ranks: int = 2, **changes: Any) -> Finished:
    return run_typed(ranks, ["-c", SHORT_PROBE, *options(folder, **changes)], timeout=90)


@pytest.mark.slow
def test_a_run_trains_as_it_chose_and_a_resumed_one_keeps_the_choice(tmp_path: Path) -> None:
    chose = train(
        tmp_path, parallel__auto="true", offload__folder=tmp_path, train__steps=12, run__name="a"
    ).ended()
    assert "planner: chosen of" in chose.stdout
    assert re.search(r"planner: predicted .* seen .* of it", chose.stdout)
    pin = re.search(r"planner: to pin it: (.*)", chose.stdout)
    assert pin is not None
    run_ranks(
        2, [*options(tmp_path, train__steps=12, run__name="p"), *pin.group(1).split()], timeout=90
    ).ended()
    assert losses(tmp_path, "a") == losses(tmp_path, "p")
    first = load_toml(tmp_path / "a" / "config.toml", RunConfig)
    more = train(
        tmp_path, parallel__auto="true", offload__folder=tmp_path, train__steps=14, run__name="a"
    ).ended()
    assert "settings that an earlier start of this run chose" in more.stdout
    assert "planner: chosen of" not in more.stdout
    then = load_toml(tmp_path / "a" / "config.toml", RunConfig)
    assert dataclasses.replace(then, train=dataclasses.replace(then.train, steps=12)) == first


def test_what_is_given_is_not_chosen(tmp_path: Path) -> None:
    done = train(
        tmp_path, 1, parallel__auto="true", parallel__stage=2, train__micro_batch=4, train__steps=1
    ).ended()
    assert "chosen of 2 settings: stage 2" in done.stdout  # with and without checkpointing
    assert "micro-batch 4" in done.stdout


def test_plan_auto_probes_with_all_ranks_and_says_how_to_pin_it(tmp_path: Path) -> None:
    done = run_ranks(
        2, ["-c", SHORT_PROBE, *PLAN, "--folder", str(tmp_path), "--json"], timeout=120
    ).ended()
    found = json.loads(done.stdout)
    assert found["troubles"] == []
    assert found["best"] == found["fitting"][0]
    assert len(found["fitting"]) == found["tried"]
    assert any(one["parameters"] == "disk" for one in found["fitting"])
    assert list(tmp_path.iterdir()) == []
    for one in found["fitting"]:
        parts = ("forward_s", "backward_s", "communication_s", "update_s", "tier_s")
        assert abs(sum(one[part] for part in parts) - one["step_s"]) < 1e-9


def test_plan_auto_says_why_a_folder_is_no_use_and_goes_on(tmp_path: Path) -> None:
    done = run_alone(
        ["-c", SHORT_PROBE, *PLAN, "--folder", str(tmp_path / "none")], timeout=120
    ).ended()
    assert "no tier on disk: rank 0" in done.stdout
    assert "chosen of" in done.stdout


GPT_60B = "--model gpt-60b --precision bf16 --machine dgx-h100"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (f"{GPT_60B} --ranks 64 --global-batch 64", 0, "to pin it: --parallel.stage 3"),
        (f"{GPT_60B} --ranks 64", 78, "got 32, expected a multiple of 64 ranks, such as 64"),
        (f"{GPT_60B} --ranks 1", 1, "nothing fits of .*closest: stage"),
        ("--model gpt-nano --ranks 2", 78, "mpirun -n 2 python -m hpczero.plan --auto"),
    ],
)
def test_plan_auto_on_a_data_sheet_starts_nothing(words: str, code: int, said: str) -> None:
    done = run_alone(["-m", "hpczero.plan", "--auto", *words.split()], timeout=60).ended(code)
    assert re.search(said, done.said, re.DOTALL), done
