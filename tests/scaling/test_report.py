"""The report command on files that somebody was killed writing, has edited, or that it does not know."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from scaling import report
from scaling.evidence.record import Row
from tests.helpers.mpirun import ROOT
from tests.scaling.studies import rows

SPEED: Row = {"kind": "speed", "model": "124M", "compiled": False, "peak_nbytes": 0}
GPU: list[Row] = [
    {"kind": "run", "machine": "nvidia-h200", "commit": "abc", "date": "today", "twin": False},
    {**SPEED, "way": "plain torch", "tokens_per_s": 100.0},
    {**SPEED, "way": "hpczero, stage 3", "tokens_per_s": 99.0, "stage": 3},
]
Report = Callable[..., str]


def write(path: Path, found: list[Row], *lines: str) -> Path:
    path.write_text("\n".join([*map(json.dumps, found), *lines]) + "\n")
    return path


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Report:
    """Runs the command in a tree whose scaling/results is empty; returns what it printed, and what it left out."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "scaling" / "results").mkdir(parents=True)

    def run_it(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        assert report.main() == 0
        told = capsys.readouterr()
        return told.out + "".join(line for line in told.err.splitlines(True) if "left out" in line)

    return run_it


@pytest.mark.tool
def test_rows_without_what_a_report_needs_are_left_out_and_counted(
    shown: Report, tmp_path: Path
) -> None:
    whole = rows()
    damaged = [json.dumps(row) for row in ({"kind": "point"}, {**whole[1], "point": {"model": 1}})]
    empty = {**whole[1], "samples_ms": {part: [] for part in whole[1]["samples_ms"]}}
    path = write(tmp_path / "sweep-strong.jsonl", whole, *damaged, json.dumps(empty), '{"kin')
    page = tmp_path / "page.html"
    said = shown(path, "--page", page)
    assert "Left out: 4 malformed line(s) of this file." in said
    assert "Left out: 4 malformed line(s) of this file." in page.read_text()
    assert "Left out: 4 malformed" in path.with_suffix(".md").read_text()
    clean = shown(write(tmp_path / "sweep-weak.jsonl", rows()))
    assert "Left out" not in clean
    assert clean.splitlines()[-4:] == said.splitlines()[-4:]  # the tables are the same


@pytest.mark.tool
def test_a_folder_stands_for_the_results_in_it(shown: Report, tmp_path: Path) -> None:
    study = tmp_path / "study"
    (study / "weak").mkdir(parents=True)
    path = write(study / "weak" / "sweep-weak.jsonl", rows())
    write(study / "metrics.jsonl", [{"kind": "step"}])  # of a training, beside them
    assert shown(study) == shown(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: holds no results .*--collect"):
        shown(tmp_path / "empty")
    page = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="empty: holds no results of"):
        shown(tmp_path / "empty", study, path, "--page", page)
    assert (
        page.read_text().count("Weak and strong scaling <code>sweep-weak</code></h2>") == 1
    )  # shown all the same, and once


def test_the_table_of_a_gpu_is_shown_with_all_others(shown: Report, tmp_path: Path) -> None:
    results = tmp_path / "scaling" / "results"
    write(results / "gpu.jsonl", GPU)
    write(results / "sweep-strong.jsonl", rows())
    page = tmp_path / "page.html"
    said = shown("--page", page)
    assert "Checks of a device: nvidia-h200, commit abc, today." in said
    assert "124M, stage 3: tokens/s at least 0.97 of plain torch: 0.99, met" in said
    assert "Strong scaling" in said
    assert "nvidia-h200" in page.read_text()
    assert not list(results.glob("gpu*.png"))


@pytest.mark.tool
def test_files_that_cannot_be_reported_do_not_keep_the_others(
    shown: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "scaling" / "results"
    write(results / "weather-today.jsonl", GPU)
    write(results / "peers-x.jsonl", [{"kind": "run"}])
    senseless = rows()
    senseless[1]["losses"] = 3
    write(results / "sweep-strong.jsonl", senseless)
    good = write(results / "sweep-weak.jsonl", rows())
    said = shown()
    assert said.count("Strong scaling") == 1
    assert "left out:" in said
    assert "got a file of 'weather'" in said
    assert "peers-x.jsonl: has no finished measurement (1 row(s), 0 malformed" in said
    with pytest.raises(
        ConfigError, match="got a file of 'weather', expected balance, bridge, checkpoint"
    ):
        shown(results / "weather-today.jsonl", good)
    told = capsys.readouterr()
    assert "Strong scaling" in told.out  # of the file that was good
    with pytest.raises(ConfigError, match=r"sweep-strong.*holds values that cannot be reported"):
        shown(results / "sweep-strong.jsonl")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scaling/results").rglob("*.jsonl")), ids=lambda path: path.stem
)
def test_committed_records_can_all_be_shown(path: Path) -> None:
    """A command whose rows nobody can print again would leave figures without a table."""
    kind = path.stem.split("-")[0]
    found, malformed = report.read(path, kind)
    assert not malformed
    assert report.REPORTS[kind].text(found)
