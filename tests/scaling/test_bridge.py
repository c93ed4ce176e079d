"""The comparison of the bridge with gloo: its arithmetic on rows made by hand, and a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.bridge import draw, text
from scaling.evidence.record import Row
from tests.scaling.studies import cells, check_drawn, head, measured


def rows() -> list[Row]:
    found = [head(ranks=2, placement="1x2", rounds=6)]
    for backend, seconds in (("gloo", 0.5), ("bridge", 0.1)):
        for number in range(6):
            took = seconds * (1 + number)
            call = {"verb": "all_gather", "dtype": "float32", "mib": 64, "backend": backend}
            found.append(
                {"kind": "call", **call, "round": number, "seconds": took, "cpu_s": took / 4}
            )
    return found


def test_text_compares_within_rounds(tmp_path: Path) -> None:
    assert cells(text(rows()), "all_gather")[-2:] == ["5.00 [5.00, 5.00]", "87.5 / 437.5"]
    check_drawn(draw, rows(), tmp_path)


@pytest.mark.tool
def test_both_backends_make_all_calls_on_two_ranks(tmp_path: Path) -> None:
    found, said = measured(2, "bridge --mib 1 --rounds 1 --warm_up 1", tmp_path, "bridge-1x2")
    calls = [(row["verb"], row["backend"]) for row in found if row["kind"] == "call"]
    assert len(calls) == 2 * len(set(calls)) == 12, calls  # in two dtypes
    assert "| all_reduce" in said
