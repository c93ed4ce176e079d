"""The plan command for a layout, as a user types it."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from tests.helpers.mpirun import ROOT, Finished, run_command

SMALL = ("--model", "gpt2", "--ranks", "16", "--ranks-per-node", "8", "--memory", "16GB")
GRID = ("--parallel.tensor", "2", "--parallel.pipeline", "4", "--accumulation", "8")


def plan(*args: str) -> Finished:
    return run_command([sys.executable, "-m", "hpczero.plan", *args], timeout=60)


def plan_json(*args: str) -> dict[str, Any]:
    done = plan(*args, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_layout_shows_stages_bubble_and_the_map_of_ranks() -> None:
    done = plan(*SMALL, *GRID)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "gpt2: 124,439,808 parameters" in said
    assert "1f1b, 8 micro-batch(es) of 1, bubble 37.5%" in said
    assert "pipeline 4 x shard 2 x tensor 2, slowest first" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["15", "1", "3", "1", "1"] in rows  # the last rank, its node and places
    (fits,) = (row for row in rows if row[:1] == ["fits"])
    assert len(fits) == 5
    stages = [row for row in rows if len(row) > 3 and row[0] in ("0", "1", "3")]
    assert any(row[:3] == ["1", "(x", "2)"] for row in stages)


def test_numbers_for_programs_are_those_of_the_table() -> None:
    report = plan_json(*SMALL, *GRID, "--machine", "dgx-a100")
    assert report["mesh"] == {"pipeline": 4, "replicate": 1, "shard": 2, "sequence": 1, "tensor": 2}
    assert report["bubble"] == 3 / 8
    assert report["global_batch"] == 16
    assert [row["stage"] for row in report["stages"]] == [0, 1, 2, 3]
    for row in report["stages"]:
        assert sum(kind["stages"] for kind in row["pipeline"]) == 4
        assert sum(kind["stages"] * kind["blocks"] for kind in row["pipeline"]) == 12
        assert row["step_s"] > 0
        for kind in row["pipeline"]:
            assert kind["needed_nbytes"] == sum(kind["memory"].values())
    assert report["recommended_stage"] is not None


def test_replicas_and_second_shard_are_shown() -> None:
    node = plan(*SMALL, "--parallel.shard", "node")
    assert "replicas, between" in node.stdout
    assert "replicate 2 x shard 8" in node.stdout
    second = plan(*SMALL, "--parallel.secondary", "true")
    (row,) = (line for line in second.stdout.splitlines() if line.startswith("second shard"))
    assert row.split()[2:5] == ["0.00", "0.00", "0.00"]  # of stage 3 alone
    assert float(row.split()[5]) > 0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--parallel.tensor", "16"), "parallel.tensor: got 16"),
        (("--parallel.pipeline", "16", "--parallel.tensor", "2"), "pipeline: got 16"),
        (("--parallel.schedule", "gpipe"), "without a pipeline"),
        (
            ("--parallel.pipeline", "4", "--parallel.interleave", "2", "--accumulation", "6"),
            "such as train.accumulation 8",
        ),
        (("--parallel.secondary", "true", "--stage", "2"), "parallel.secondary"),
        (("--parallel.tensor", "2", "--memory", "1MB", "--stage", "3"), "--stage 3 in this layout"),
    ],
)
def test_layout_that_cannot_be_ends_with_78(args: tuple[str, ...], expected: str) -> None:
    done = plan(*SMALL[: -2 if "--memory" in args else None], *args)
    assert done.returncode == 78, done
    assert expected in done.stderr


def test_without_degrees_the_answer_is_the_table_of_before() -> None:
    done = plan(*SMALL, "--parallel.tensor", "1")
    assert "paper's 2+2+12 bytes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_page_of_layouts_shows_what_the_command_prints(place: int) -> None:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"```bash\npython -m hpczero\.plan ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert len(shown) == 2
    words, expected = shown[place]
    done = run_command([sys.executable, "-m", "hpczero.plan", *words.split()], timeout=240)
    assert done.returncode == 0, done
    assert done.stdout == expected
