"""The comparison of the bridge with gloo: its arithmetic on rows made by hand, and a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaling.bridge import draw, text
from scaling.evidence.record import Row
from tests.helpers.mpirun import run_ranks


def rows() -> list[Row]:
    head = {
        "kind": "run",
        "ranks": 2,
        "placement": "1x2",
        "rounds": 6,
        "cores": 2,
        "cpu": "a CPU",
        "load": 0.5,
        "machine": "a machine",
        "commit": "abc",
        "date": "today",
    }
    found: list[Row] = [head]
    for backend, seconds in (("gloo", 0.5), ("bridge", 0.1)):
        for number in range(6):
            took = seconds * (1 + number)
            call = {"verb": "all_gather", "dtype": "float32", "mib": 64, "backend": backend}
            found.append(
                {"kind": "call", **call, "round": number, "seconds": took, "cpu_s": took / 4}
            )
    return found


def test_text_compares_within_rounds(tmp_path: Path) -> None:
    line = next(line for line in text(rows()).splitlines() if line.startswith("| all_gather"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[-3:-1] == ["5.00 [5.00, 5.00]", "87.5 / 437.5"]
    draw(rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.tool
def test_both_backends_make_all_calls_on_two_ranks(tmp_path: Path) -> None:
    words = ["-m", "scaling.bridge", "--mib", "1", "--rounds", "1", "--warm_up", "1"]
    done = run_ranks(2, [*words, "--results", str(tmp_path)], timeout=120)
    assert done.returncode == 0, done
    (file,) = tmp_path.rglob("bridge-1x2.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    calls = [(row["verb"], row["backend"]) for row in found if row["kind"] == "call"]
    assert len(calls) == 2 * len(set(calls)) == 12, calls  # in two dtypes
    assert "| all_reduce" in done.stdout
