"""The data command as a user types it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpczero.data import TokenFile
from tests.helpers.mpirun import Finished, run_command


def data(*args: str) -> Finished:
    return run_command([sys.executable, "-m", "hpczero.data", *args], timeout=60)


def test_prepare_then_show_say_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("def f():\n    return 1\n" * 200)
    out = str(tmp_path / "tokens.h5")
    options = ("--tokenizer", "bpe", "--vocab-size", "270", "--validation-fraction", "0.25")
    prepared = data("prepare", str(tmp_path / "book.txt"), "--out", out, *options).ended()
    shown = data("show", out).ended()
    assert shown.stdout == prepared.stdout
    with TokenFile.open(Path(out)) as file:
        assert f"vocabulary {file.vocab_size}," in shown.stdout
        assert file.vocab_size <= 270
        assert f"{len(file.train):,} tokens" in shown.stdout
        assert file.validation.text_nbytes == pytest.approx(0.25 * 200 * 22, abs=22)
    assert "  | def f():" in shown.stdout


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_names_and_texts_that_the_terminal_cannot_show_are_shown_in_escapes(
    tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "book.txt").write_text("naïve ☃\n" * 200)
    out = os.fsdecode(bytes(tmp_path) + b"/t\xff.h5")
    command = [sys.executable, *f"-m hpczero.data prepare {tmp_path}/book.txt --out".split(), out]
    done = run_command(command, 60, {"PYTHONIOENCODING": encoding}, fresh=True).ended()
    assert r"t\udcff.h5: ByteTokenizer" in done.stdout
    assert ("naïve ☃" if encoding.startswith("utf") else r"na\xefve \u2603") in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("show", "nowhere.h5"), "DataError: nowhere.h5: no such token file"),
        (("prepare", "nowhere.txt"), "DataError: nowhere.txt: no such file or folder"),
        (("prepare", "--bogus", "1"), "--bogus"),
        (("prepare", "--tokenizer", "words"), "words"),
        (("prepare", "--validation-fraction", "x"), "validation"),
        ((), "prepare, show"),
    ],
)
def test_bad_input_is_one_line_and_exit_78(args: tuple[str, ...], said: str) -> None:
    done = data(*args).ended(78)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
