"""The measurement of memory tiers: its arithmetic on rows made by hand, and a real run on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.evidence.record import Row
from scaling.tiers.__main__ import draw, ratios, text
from tests.helpers.mpirun import run_ranks
from tests.scaling.studies import check_drawn, head, measured


def rows() -> list[Row]:
    seconds = {
        "pass from disk": 3.0,
        "pass in memory": 2.0,
        "disk of a pass": 1.0,
        "step from disk": 2.2,
        "step in memory": 0.5,
        "disk of a step": 2.0,
    }
    found = [head(description="a model", ranks=2, rounds=2, tier="file", staging="6 blocks")]
    for number, slower in enumerate((1.0, 4.0)):  # ratios are those of a round
        for name, took in seconds.items():
            waited = 0.05 if name == "pass from disk" else 0.0
            times = {"seconds": took * slower, "waited_s": waited * slower}
            found.append({"kind": "case", "case": name, "round": number, **times})
        for name, rate in (("engine reads", 0.9e9), ("fio reads", 1e9)):
            row = {"kind": "case", "case": name, "round": number, "seconds": 1.0, "waited_s": 0.0}
            found.append({**row, "rate": rate * slower})
    return found


def test_a_case_is_held_against_the_longer_of_memory_and_disk_of_its_round() -> None:
    found = {name: spread.median for name, spread in ratios(rows()).items()}
    assert found == {
        "step from disk / the longer of disk alone and memory": pytest.approx(1.1),
        "pass from disk / the longer of disk alone and memory": pytest.approx(1.5),
        "waits of a pass / its disk alone": pytest.approx(0.05),
        "engine reads / fio reads": pytest.approx(0.9),
    }


def test_text_and_plot_have_every_case(tmp_path: Path) -> None:
    said = text(rows())
    assert "| step from disk " in said
    assert "| engine reads / fio reads " in said
    assert "2,250 MB/s" in said or "2250 [900, 3600] MB/s" in said
    check_drawn(draw, rows(), tmp_path)


@pytest.mark.tool
def test_two_ranks_train_from_disk_and_in_memory_with_the_same_losses(tmp_path: Path) -> None:
    words = f"tiers --folder {tmp_path} --workload tiny --rounds 1 --fio_mib 0 --window 1"
    found, said = measured(2, words, tmp_path, "tiers-tiny-2")
    cases = {row["case"]: row for row in found if row["kind"] == "case"}
    moved = {name: row["nbytes"] for name, row in cases.items()}
    assert moved["step from disk"] == moved["disk of a step"] > 0
    assert moved["pass from disk"] == moved["disk of a pass"] > 0
    assert moved["pass in memory"] == moved["step in memory"] == 0
    assert "| engine writes" in said
    assert "fio" not in said


@pytest.mark.tool
def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run_ranks(
        1, ["-m", "scaling.tiers", "--folder", str(tmp_path / "none")], timeout=60
    ).ended(78)
    assert "--folder" in done.stderr
