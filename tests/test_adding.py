"""The examples of docs/adding.md run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_command

PAGE = ROOT / "docs" / "adding.md"
BLOCK = re.compile(r"```(?:python|toml)\n# file: (\S+)\n(.*?)```", re.DOTALL)
EXAMPLES = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
SHORT = 60  # lines of an own transport or tier, written from that page alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adding")
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.limit(400)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "0 2", "3"])
def test_examples_pass_their_tests(folder: Path, ranks: str) -> None:
    tests = [name for name in EXAMPLES if name.startswith("test_")]
    command = [
        sys.executable,
        "tests/run.py",
        *(folder / name for name in tests),
        f"--rootdir={folder}",
        *("-p", "tests.conftest", "-c", "setup.cfg", f"-opythonpath={ROOT} {folder}"),
    ]
    done = run_command(command, 350, {"HPCZERO_TEST_RANKS": ranks}).ended()
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"[1-9]\d* passed, 0 failed, \d+ skipped", summary), done


@pytest.mark.parametrize("name", ["relay.py", "packed.py"])
def test_transport_and_tier_are_short(name: str) -> None:
    assert len(EXAMPLES[name].splitlines()) < SHORT


def test_every_part_of_the_table_has_its_example_and_its_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = re.findall(r"^\| \[([\w ]+)\]\(#", text, re.MULTILINE)
    assert len(parts) >= 8
    for part in parts:
        section = re.search(rf"^## An? {part}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        assert section is not None, part
        assert BLOCK.search(section[1]), part
