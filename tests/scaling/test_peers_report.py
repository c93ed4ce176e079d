"""Tables from rows made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.evidence.record import Row
from scaling.evidence.spread import table
from scaling.peers import draw, summarise, text
from tests.scaling.studies import cells, check_drawn, head

MIB = 2**20
SLOWER = (1.0, 3.0, 2.0, 10.0, 1.5, 1.0, 4.0)  # how much the machine was slowed down in each round
STEP_S = {"independent": 0.5, "hpczero-3": 0.6, "fsdp2": 1.2}


def rows() -> list[Row]:
    names = {name: name.upper() for name in (*STEP_S, "zero-redundancy")}
    found = [head(titles=names, description="a model", ranks=2, rounds=len(SLOWER))]
    for name in names:
        found.append(
            {
                "kind": "memory",
                "contender": name,
                "settings": {"how": "well"},
                "baseline_nbytes": [100 * MIB, 110 * MIB],
                "step_peak_nbytes": [300 * MIB, (800 if name == "fsdp2" else 400) * MIB],
            }
        )
        found.append({"kind": "losses", "contender": name, "losses": [1.0] * 9})
    for number, slower in enumerate(SLOWER):
        found += [turn(0, number, name, slower * STEP_S[name]) for name in STEP_S]
        found.append(turn(1, number, "zero-redundancy", 1.0))
    return found


def turn(group: int, number: int, name: str, step_s: float) -> Row:
    return {
        "kind": "turn",
        "group": group,
        "round": number,
        "contender": name,
        "steps": 4,
        "seconds": [4 * step_s * 0.9, 4 * step_s],
        "window_s": 4 * step_s,
        "foreign_cpu_s": 0.8 * step_s,
        "sleeping_cpu_s": 0.0,
    }


def test_ratios_see_through_a_machine_that_is_slower_in_some_rounds() -> None:
    ours = next(line for line in summarise(rows()) if line.name == "hpczero-3")
    assert ours.step_s.median == pytest.approx(2.0 * 0.6)  # of the slowest rank
    for reference, expected in (("fsdp2", 0.5), ("independent", 1.2)):
        ratio = ours.ratios[reference]
        assert (ratio.low, ratio.median, ratio.high) == pytest.approx((expected,) * 3)


def test_contenders_that_never_shared_a_round_are_not_compared() -> None:
    lines = {line.name: line for line in summarise(rows())}
    assert set(lines) == {*STEP_S, "zero-redundancy"}
    assert lines["zero-redundancy"].ratios == {}
    assert "deepspeed-3" not in lines["hpczero-3"].ratios


def test_text_shows_step_time_ratios_memory_and_disturbance(tmp_path: Path) -> None:
    said = text(rows())
    assert cells(said, "contender")[2:4] == ["/ floor", "/ FSDP2"]
    assert cells(said, "HPCZERO-3")[1:] == [
        "1200 [600, 6000]",
        "1.20 [1.20, 1.20]",
        "0.50 [0.50, 0.50]",
        "400",
        "110",
        "0.50",
    ]
    assert cells(said, "FSDP2")[3] == "1"
    assert cells(said, "ZERO-REDUNDANCY")[2:4] == ["–", "–"]
    assert "other programs took 10.0% (median turn; at most 10.0%)" in said
    assert "95 % interval" in said
    assert "- FSDP2: how well" in said
    check_drawn(draw, rows(), tmp_path)


def test_table_is_aligned_markdown() -> None:
    assert table(["name", "x"], [["a", "10"], ["long name", "2"]]).splitlines() == [
        "| name      |  x |",
        "| --------- | -: |",
        "| a         | 10 |",
        "| long name |  2 |",
    ]
