"""The comparison of checkpoints: its arithmetic on rows made by hand, its savers, and a real run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scaling.checkpoint.__main__ import draw, goals, holds, seconds, text
from scaling.checkpoint.ways import forget
from scaling.evidence.record import Row
from tests.scaling.studies import check_drawn, head, measured

SLOWER = (1.0, 3.0, 2.0, 10.0, 1.5, 1.0)
SAVE_S = {"raw": 0.8, "posix": 0.9, "mpio": 1.25, "dcp": 1.0}
LOAD_S = {"raw": 0.2, "posix": 0.5, "mpio": 0.5, "dcp": 1.0}
MIB = 2**20


def rows(*, hold_s: float = 0.2) -> list[Row]:
    found = [
        head(
            ranks=2,
            rounds=len(SLOWER),
            description="a model",
            filesystem="ext4",
            state_nbytes=200 * MIB,
            shard_nbytes=100 * MIB,
            mpi_io="^ompio",
            hdf5="1",
        )
    ]
    for number, slower in enumerate(SLOWER):
        for way, save_s in SAVE_S.items():
            row = {"kind": "move", "way": way, "round": number}
            row["save_s"] = [slower * save_s, slower * save_s / 2]
            row["load_s"] = [0.0, slower * LOAD_S[way]]
            found.append(row)
        found.append(
            {
                "kind": "hold",
                "round": number,
                "copy_s": [slower * 0.1, slower * 0.2],
                "hold_s": [slower * hold_s, 0.0],
                "quiet_s": [[1.0, 1.0], [0.5, 1.0]],
                "busy_s": [[1.5, 1.0], [2.0, 1.25]],
                "write_s": [3.0, 3.5],
            }
        )
    extra = {"save_extra_nbytes": [50 * MIB, 60 * MIB], "load_extra_nbytes": [1, 613 * MIB]}
    found.append({"kind": "memory", "way": "posix", **extra})
    return found


def lines(said: str, name: str) -> list[list[str]]:
    found = [line for line in said.splitlines() if line.startswith(f"| {name}")]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in found]


def test_the_slowest_rank_counts() -> None:
    assert seconds(rows(), "save")["posix"][1] == pytest.approx(2.7)
    assert seconds(rows(), "load")["posix"][1] == pytest.approx(1.5)


def test_speeds_are_compared_within_rounds(tmp_path: Path) -> None:
    said = text(rows())
    save, load, _ = lines(said, "hpczero, posix")
    assert save[0] == "1575 [900, 9000]"
    assert save[2:] == ["0.89 [0.89, 0.89]", "1.11 [1.11, 1.11]"]
    assert load[2:] == ["0.40 [0.40, 0.40]", "2.00 [2.00, 2.00]"]
    assert lines(said, "raw bytes")[0][2] == "1"
    check_drawn(draw, rows(), tmp_path)


def test_what_a_save_in_the_background_costs_is_the_hold_and_the_longer_steps() -> None:
    found = holds(rows())
    assert found["quiet"][0] == 1.0
    assert found["busy"][0] == pytest.approx(1.625)
    assert found["cost"][0] == pytest.approx(0.2 + 3.25 - 2.0)
    assert lines(text(rows()), "hold / copy") == [["1.00 [1.00, 1.00]"]]


def test_goals_say_what_is_missed() -> None:
    verdicts = [line.rpartition(" ")[2] for line in goals(rows())]
    # posix: 0.89 of raw, faster than DCP both ways, 613 MiB of 612; mpio: 0.64 of raw, slower than DCP; hold = copy
    assert verdicts == ["met", "met", "met", "missed", "missed", "missed", "met", "met"]
    assert goals(rows(hold_s=0.3))[-1].endswith("missed")


def test_a_report_without_mpio_and_background() -> None:
    found = [r for r in rows() if r["kind"] != "hold" and r.get("way") != "mpio"]
    said = text(found)
    assert "one thread" in said
    assert "hpczero, mpio" not in said


def test_forget_leaves_content_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * 10_000)
    os.sync()
    forget(tmp_path)
    assert path.read_bytes() == b"x" * 10_000


@pytest.mark.tool
def test_every_way_saves_and_loads_in_one_run(tmp_path: Path) -> None:
    words = "checkpoint --workload tiny --rounds 1 --warm-up 0 --steps 1 --folder"
    found, said = measured(0, f"{words} {tmp_path / 'disk'}", tmp_path, "checkpoint-tiny")
    ways = {row["way"] for row in found if row["kind"] == "move"}
    assert ways >= {"raw", "posix", "dcp"}
    assert {row["way"] for row in found if row["kind"] == "memory"} == ways - {"raw"}
    assert "hpczero, posix" in said
    assert not list((tmp_path / "disk").iterdir())
