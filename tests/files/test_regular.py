"""Files that are none, and text of any depth: an error at once, and never a wait."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpczero.files.regular import open_regular, parse_json, read_bytes, read_text, reason, shown


class WaitedError(BaseException):
    """Of no kind that anybody catches."""


@contextmanager
def at_once(limit_s: int = 20) -> Iterator[None]:
    """A wait inside becomes a WaitedError."""

    def waited(*_: object) -> None:
        raise WaitedError

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("grün", encoding="utf-8")
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "grün"
    os.close(open_regular(tmp_path / "a"))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    expected = {
        "fifo": "is a FIFO, expected a regular file",
        "to-fifo": "is a FIFO, expected a regular file",
        "zero": "is a device, expected a regular file",
        "folder": "is a folder, expected a regular file",
        "round": "Too many levels of symbolic links",
        "none": "No such file or directory",
        "a\0b": "has a null character in its name",
        "a" * 300: "File name too long",
    }
    for name, message in expected.items():
        with at_once(), pytest.raises(OSError) as caught:
            read_bytes(tmp_path / name)
        assert reason(caught.value) == message


def test_long_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match=r"1,099,511,627,776 bytes, expected at most 1,073,741,824"):
        read_bytes(tmp_path / "sparse")


def test_short_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    tracemalloc.start()
    assert read_bytes(tmp_path / "short") == b"x" * 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5001, "digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the key 'c' twice"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_that_is_none_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_messages_stay_short() -> None:
    assert shown([1, "a"]) == "[1, 'a']"
    assert len(shown("x" * 1000)) == 80
    assert shown(10**5000) == "a number of very many digits"
