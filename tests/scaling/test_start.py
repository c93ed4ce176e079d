"""The first seconds beside another checkout: the arithmetic on rows made by hand, and one real job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scaling.evidence.record import Row, read_rows
from scaling.start import HELP, OTHER, THIS, text
from tests.commands.test_help import WITH_SUBCOMMANDS, commands, subcommands
from tests.helpers.mpirun import ROOT, run_command
from tests.scaling.studies import cells, head


def rows() -> list[Row]:
    found = [head(rounds=3, against="elsewhere")]
    case = {"kind": "start", "group": "mistakes", "case": "no text", "ranks": 2, "code": 78}
    for number, slower in enumerate((1.0, 2.0, 10.0)):
        for tree, told in ((THIS, 0.5), (OTHER, 3.0)):
            times = {"told_s": told * slower, "ended_s": told * slower + 1}
            found.append({**case, **times, "tree": tree, "round": number, "errors": 1})
    return found


def test_text_compares_both_checkouts_within_rounds() -> None:
    assert cells(text(rows()), "no text: told")[1:] == [
        "2",
        "1.00 [0.50, 5.00]",
        "6.00 [3.00, 30.00]",
        "6.00 [6.00, 6.00]",
    ]


@pytest.mark.tool
def test_help_of_every_command_is_measured() -> None:
    assert sorted(HELP) == commands()
    for module in WITH_SUBCOMMANDS:
        assert list(HELP[module]) == ["", *subcommands(module)]


@pytest.mark.tool
def test_a_run_and_its_mistakes_are_timed(tmp_path: Path) -> None:
    words = ["--cases", "run", "mistakes", "--ranks", "1", "--rounds", "1"]
    words += ["--results", str(tmp_path)]
    done = run_command([sys.executable, "-m", "scaling.start", *words], 100, cwd=ROOT)
    assert done.returncode == 0, done
    (file,) = tmp_path.rglob("*.jsonl")
    found = read_rows(file)
    by_case = {row["case"]: row for row in found if row["kind"] == "start"}
    ran = by_case.pop("run")
    assert 0 < ran["first_s"] < ran["header_s"] < ran["ended_s"]
    assert len(by_case) == 4
    for row in by_case.values():
        assert (row["code"], row["errors"]) == (78, 1)
        assert 0 < row["told_s"] < row["ended_s"]
    assert "| run: header" in done.stdout
