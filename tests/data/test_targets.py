"""What a new token file may take the place of: a token file, and nothing else that somebody has put there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero.data import Corpus, TokenFile, prepare
from hpczero.errors import DataError
from hpczero.job.long_work import Progress

TEXT = "a line of some text\n" * 200


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def checkpoint(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["format"] = "another"


TELLS_OF_TOKENS = b"x" * 900 + b"hpczero tokens 2: 5 bytes".ljust(255) + b"\n"
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another text": (lambda path: path.write_text("hours of work"), "is no token file"),
    "nothing in it": (Path.touch, "is no token file"),
    "checkpoint": (checkpoint, "is no token file"),
    "text that tells of tokens": (lambda path: path.write_bytes(TELLS_OF_TOKENS), "is no token"),
    "folder": (Path.mkdir, "is a directory"),
    "FIFO": (os.mkfifo, "is a FIFO"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
}


def kept(path: Path) -> tuple[object, ...]:
    """What tells whether somebody has written there; not when it was last read."""
    found = os.lstat(path)
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_token_file_is_refused_by_name_and_stays(
    text: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    make, said = KINDS[kind]
    make(out)
    before, there = kept(out), sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=rf"{out}: {said}.*give (one|another name)"):
        prepare(Corpus.of_paths([text]), out)
    assert kept(out) == before
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("name", [".", "/", "..", ""])
def test_name_that_is_a_folder_is_refused_by_name(text: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"is a directory, expected .*; give"):
        prepare(Corpus.of_paths([text]), Path(name))


def test_a_token_file_and_a_damaged_one_are_replaced(tmp_path: Path, text: Path) -> None:
    new, cut, dirty = (tmp_path / name for name in ("new", "cut", "dirty"))
    for path in (new, cut, dirty):
        prepare(Corpus.of_paths([text]), path)
    os.truncate(cut, cut.stat().st_size - 100)
    data = bytearray(dirty.read_bytes())
    data[-200] ^= 1
    dirty.write_bytes(data)
    for path in (new, cut, dirty):
        prepare(Corpus.of_paths([text]), path)
        with TokenFile.open(path) as file:
            file.train.check()


def test_file_that_somebody_puts_there_meanwhile_stays(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out.h5"
    corpus = Corpus.of_paths([text])

    class Put(Progress):
        def advance(self, nbytes: int = 0) -> None:
            if nbytes:
                out.write_text("mine")

    with pytest.raises(DataError, match="is no token file"):
        prepare(corpus, out, progress=Put())
    assert out.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == sorted([out, text])
