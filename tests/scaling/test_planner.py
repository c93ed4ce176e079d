"""The measurement of the planner: its arithmetic on rows made by hand, and a real run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaling.evidence.record import Row
from scaling.planner.report import draw, text, verdicts
from tests.helpers.mpirun import run_ranks


def rows() -> list[Row]:
    head = {
        "kind": "run",
        "cpu": "a CPU",
        "cores": 2,
        "machine": "a machine",
        "commit": "abc",
        "date": "2026-01-01",
        "ranks": 2,
        "rounds": 2,
        "steps": 2,
    }
    found: list[Row] = [head]
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
    assert found.foretold == pytest.approx((1 / 1.1 + 1 / 1.5) / 2)


def test_text_and_plot_have_every_setting(tmp_path: Path) -> None:
    assert "| 8 x 512 " in text(rows())
    draw(rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_two_ranks_train_the_choice_and_others(tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--only", "1", "--rounds", "1", "--steps", "1"]
    words += ["--candidates", "2", "--results", str(tmp_path / "results")]
    done = run_ranks(2, ["-m", "scaling.planner", *words], timeout=150)
    assert done.returncode == 0, done
    (file,) = (tmp_path / "results").rglob("planner-2.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    turns = [row for row in found if row["kind"] == "turn"]
    assert sum(row["is_choice"] for row in turns) == 1
    assert all(row["seconds"] > 0 < row["foretold_s"] for row in turns)
    assert "| 8 x 512, 4 x 128 tokens, room 0.1 " in done.stdout
