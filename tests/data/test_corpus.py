"""Finding text: what is taken, in which order, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import sys
import sysconfig
from pathlib import Path

import h5py
import pytest

from hpczero.data import Corpus, corpus
from hpczero.data.__main__ import main
from hpczero.errors import ConfigError, DataError
from tests.data.blocks import blocks_of


def write(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def texts(found: Corpus) -> list[bytes]:
    return [b"".join(blocks_of(document)) for document in found.documents]


def test_folders_give_all_visible_files_and_files_themselves(tmp_path: Path) -> None:
    write(tmp_path / "a/one.txt", b"one")
    write(tmp_path / "a/deep/er/two", b"two")
    write(tmp_path / "a/empty", b"")
    write(tmp_path / "a/.git/config", b"hidden")
    write(tmp_path / "a/.hidden", b"hidden")
    write(tmp_path / "elsewhere/four", b"four")
    (tmp_path / "a/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "a/deep/back").symlink_to(tmp_path / "a")  # a circle
    alone = write(tmp_path / "three.txt", b"three")
    found = Corpus.of_paths([tmp_path / "a", alone, tmp_path / "a/one.txt"])
    assert sorted(texts(found)) == [b"four", b"one", b"three", b"two"]
    assert found.nbytes == 15


@pytest.mark.parametrize("kind", ["gzip", "HDF5", "link"])
def test_what_a_folder_holds_beside_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a/one.txt", b"one")
    if kind == "gzip":
        write(tmp_path / "a/two", gzip.compress(b"two"))
    elif kind == "HDF5":
        h5py.File(tmp_path / "a/two", "w").close()
    else:
        (tmp_path / "a/two").symlink_to(tmp_path / "nowhere")
    said = "link to a file that is not there" if kind == "link" else f"a file of {kind}, not text"
    with pytest.raises(DataError, match=f"a/two: is {'a ' if kind == 'link' else ''}{said}"):
        Corpus.of_paths([tmp_path / "a"])


def test_an_empty_path_is_not_the_folder_one_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["data", "prepare", ""])
    with pytest.raises(ConfigError, match="got an empty argument"):
        main()


def test_order_and_digest_depend_on_contents_alone(tmp_path: Path) -> None:
    contents = [f"text {index}".encode() for index in range(20)]
    for index, text in enumerate(contents):
        write(tmp_path / f"up/{index:02}", text)
        write(tmp_path / f"down/{99 - index}/x", text)
    up, down = (Corpus.of_paths([tmp_path / name]) for name in ("up", "down"))
    assert texts(up) == texts(down)
    assert texts(up) == sorted(contents, key=lambda text: hashlib.sha256(text).digest())
    assert texts(up) != contents
    assert up.digest == down.digest
    write(tmp_path / "up/00", b"text X")
    assert Corpus.of_paths([tmp_path / "up"]).digest != down.digest


@pytest.mark.parametrize(
    "text",
    [
        ("ein Wort nach dem anderen, " * 40 + "\nEnde").encode(),
        ("ohneZwischenraumé☃" * 60).encode(),
        b"x" * 9 + b"\n" + b"y" * 500 + b"\n" + b"z" * 9,
        b"\x80" * 1000,  # no text
    ],
)
def test_line_that_is_too_long_for_memory_is_divided_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 30)
    monkeypatch.setattr(corpus, "REST_NBYTES", 30)
    (document,) = Corpus.of_paths([write(tmp_path / "text", text)]).documents
    blocks = blocks_of(document)
    assert b"".join(blocks) == text
    assert all(0 < len(block) < 100 for block in blocks)
    assert document.nbytes == len(text)
    if text[:1] != b"\x80":
        assert all(block.decode() for block in blocks), "no character is cut"


def test_blocks_of_lines_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 10)
    text = b"".join(b"%d" % 10**index + b"\n" for index in range(15)) + b"no end of line"
    (document,) = Corpus.of_paths([write(tmp_path / "text", text)]).documents
    blocks = blocks_of(document)
    assert len(blocks) > 5
    assert b"".join(blocks) == text
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_standard_library_is_python_source_without_tests() -> None:
    found = Corpus.standard_library()
    root = Path(sysconfig.get_path("stdlib"))
    names = {document.path.relative_to(root).as_posix() for document in found.documents}
    assert {"os.py", "json/decoder.py"} <= names
    assert all(name.endswith(".py") for name in names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test"}
    assert found.nbytes > 3_000_000


def test_paths_without_text_are_refused_by_name(tmp_path: Path) -> None:
    empty = write(tmp_path / "folder/empty", b"")
    good = write(tmp_path / "good", b"text")
    for path in (empty, empty.parent):
        with pytest.raises(DataError, match=rf"{path}: holds no text \(0 bytes in 1 files\)"):
            Corpus.of_paths([good, path])
    with pytest.raises(DataError, match="no text files were given"):
        Corpus.of_paths([])
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; give existing"):
        Corpus.of_paths([tmp_path / "nowhere"])


def test_failing_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "text", b"text")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(corpus, "open_regular", fail)
    with pytest.raises(DataError, match=r"text: cannot be read .Input/output error"):
        Corpus.of_paths([path])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"line\nline\n", "has 10 bytes, had 5 a moment ago"),
        (b"LINE\n", "log: holds another text than a moment ago"),  # else kept under its digest
    ],
)
def test_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, text: bytes, said: str
) -> None:
    path = write(tmp_path / "log", b"line\n")
    (document,) = Corpus.of_paths([path]).documents
    write(path, text)
    with pytest.raises(DataError, match=said):
        blocks_of(document)
