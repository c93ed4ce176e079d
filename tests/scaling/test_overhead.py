"""The comparison of thread times: it runs, trains as plain torch does, and counts what a device would wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaling.evidence.record import of_kind, read_rows
from scaling.overhead.__main__ import text
from tests.helpers.mpirun import ROOT
from tests.scaling.studies import cells, head


@pytest.mark.usefixtures("forks")
def test_a_small_run_writes_rows_and_counts_waits(tmp_path: Path) -> None:
    words = ["--layers", "2", "--rounds", "2", "--steps", "2", "--warm_up", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "scaling.overhead", *words, "--results", os.fspath(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("*/overhead-2.jsonl")
    rows = read_rows(path)
    steppers = {row["name"]: row["waits"] for row in of_kind(rows, "stepper")}
    assert list(steppers) == ["plain torch", *(f"stage {stage}" for stage in range(4))]
    assert sum(steppers["plain torch"].values()) == 1, "the loss"
    for stage in range(4):
        assert sum(steppers[f"stage {stage}"].values()) == 1, "the loss comes with the norm"
    assert len(list(of_kind(rows, "turn"))) == 10
    assert done.stdout.startswith(text(rows)[:40])


def test_ratios_are_formed_within_a_round() -> None:
    rows = [head(description="a model", rounds=2, steps=1)]
    rows += [{"kind": "stepper", "name": name, "waits": {}} for name in ("plain torch", "stage 0")]
    for number, plain in enumerate((1e-3, 3e-3)):
        for name, factor in (("plain torch", 1.0), ("stage 0", 1.4)):
            seconds = {"forward": plain * factor / 2, "backward": plain * factor / 2}
            rows.append({"kind": "turn", "name": name, "round": number, "seconds": seconds})
    assert {"1.40 [1.40, 1.40]", "yes"} <= set(cells(text(rows), "stage 0"))
