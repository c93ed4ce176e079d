"""The measurement of the planner: its arithmetic on rows made by hand, and a real run on two ranks."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from hpczero.job.mesh import Mesh
from hpczero.plan.offload import MIB, Offload
from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import Freedom, candidates
from hpczero.planner.search import prediction_on, search
from hpczero.predict.machine import load_machine
from scaling.evidence.record import Row
from scaling.planner.__main__ import draw, key, picked, summary, text, verdicts
from scaling.planner.settings import Setting
from tests.scaling.studies import check_drawn, head, measured


def rows() -> list[Row]:
    found = [head(ranks=2, rounds=2, steps=2)]
    for turn, (fast, slow) in enumerate(((1.0, 1.1), (1.2, 1.5))):
        for candidate, seconds in (("stage 0", fast), ("stage 3", slow)):
            found.append(
                {
                    "kind": "turn",
                    "setting": "8 x 512",
                    "round": turn,
                    "candidate": candidate,
                    "is_choice": candidate == "stage 3",
                    "foretold_s": 1.0,
                    "seconds": seconds,
                    "fitting": 9,
                }
            )
    return found


def test_choice_is_held_against_the_fastest_and_its_times_against_those_seen() -> None:
    (found,) = verdicts(rows())
    assert (found.choice, found.best, found.tried, found.fitting) == ("stage 3", "stage 0", 2, 9)
    assert found.slower == pytest.approx(1.3 / 1.1)
    assert found.predicted == pytest.approx((1 / 1.1 + 1 / 1.5) / 2)


def test_summary_counts_choices_near_the_fastest_and_times_near_those_seen() -> None:
    said = summary(
        rows()
    )  # 1.3 / 1.1 slower; predicted 0.91 and 0.67 of what was seen, at the median 0.79
    assert said.startswith("0 of 1 choices within 15% of the fastest")
    assert "1 of 1 predicted within 25% of what was seen" in said
    assert "of all 4 turns: median 0.87, 0.67 to 1.00" in said
    assert said in text(rows())


def test_text_and_plot_have_every_setting(tmp_path: Path) -> None:
    assert "| 8 x 512 " in text(rows())
    check_drawn(draw, rows(), tmp_path)


def test_choice_runner_up_and_distinct_kinds_are_trained_and_nothing_far_slower() -> None:
    model = Setting(12, 512, 128, 2).model
    run = PlannedRun(
        model,
        Mesh(shard=2),
        ranks_per_node=2,
        transport="window",
        stage=3,
        precision="fp32",
        micro_batch=2,
        accumulation=1,
        checkpointing=False,
        offload=Offload(window=MIB),
    )
    sheet = dataclasses.replace(load_machine("dgx-h100"), disk_read=5e11, disk_write=5e11)
    freedom = Freedom(media=["disk"], rests=["disk"], folder="/scratch")
    least = min(one.most for one in candidates(run, freedom))
    limit = least + 0.3 * (run.most - least)
    choice = search(run, freedom, prediction_on(sheet), fits=lambda one: one.most <= limit)
    assert choice.best is not None
    assert choice.runner_up is not None
    found = picked(choice, 6, random.Random(0))
    assert [key(one) for one in found[:2]] == [key(choice.best.run), key(choice.runner_up.run)]
    assert len({key(one) for one in found}) == len(found) == min(6, len(choice.fitting))
    assert any(one.offload.any and one.offload.fraction < 1 for one in found)
    predicted = {key(one.run): one.step_s for one in choice.fitting}
    assert max(predicted[key(one)] for one in found) <= 2.5 * choice.best.step_s


@pytest.mark.tool
def test_two_ranks_train_the_choice_and_others(tmp_path: Path) -> None:
    words = f"planner --folder {tmp_path} --only 1 --rounds 1 --steps 1 --candidates 2"
    found, said = measured(2, words, tmp_path, "planner-2")
    turns = [row for row in found if row["kind"] == "turn"]
    assert sum(row["is_choice"] for row in turns) == 1
    assert all(row["seconds"] > 0 < row["foretold_s"] for row in turns)
    assert "| 8 x 512, 2 x 128 tokens, room 0.5 " in said
