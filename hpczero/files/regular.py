"""Other programs' files: opened only where they are regular, read only as far as they may be long.

A FIFO, a device or a folder in the place of a file is an error instead of a wait.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

TEXT_NBYTES = 2**30  # more than any text of ours has; a manifest of 10^12 parameters has 20 MB
SHOWN = 80
WHY = "<reason>"  # in the text of an Explained: what the system says

_LOST = "a link to nothing"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> int:
    """Open a regular file and return its descriptor. Never waits for a writer, and has no effect on a device.

    Raises:
        OSError: there is no such file, it is not regular, or it may not be read; ``reason`` says it in words.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "has a null character in its name", str(path))
    _refuse_others(path, os.stat(path))  # first: opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(path, os.fstat(descriptor))  # another one since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor as of ``open_regular``, until the end of the block."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_others(path: Path, found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected a regular file", str(path))
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"is {what}, expected a regular file", str(path))


def kind_of(path: Path) -> str:
    """What is at ``path``, links followed: ``a file``, ``a directory``, ``a FIFO`` ...; empty if there is nothing.

    Raises:
        OSError: the system does not say.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _LOST if os.path.islink(path) else ""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a link to itself"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def is_there(path: Path) -> bool:
    """Whether there is anything at ``path``, links followed. Unlike ``Path.exists`` it never guesses.

    Raises:
        OSError: the system does not say.
    """
    return kind_of(path) not in ("", _LOST)


def check_regular(path: Path) -> None:
    """Raise what ``open_regular`` raises, before a library opens ``path`` by its name."""
    os.close(open_regular(path))


def read_bytes(path: Path, limit: int = TEXT_NBYTES) -> bytes:
    """All bytes of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: as ``open_regular``; or the file is longer.
    """
    with open(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise OSError(
                errno.EFBIG, f"has {nbytes:,} bytes, expected at most {limit:,}", str(path)
            )
        return file.read(nbytes + 1)  # not more: it takes that much memory at once


def read_text(path: Path, limit: int = TEXT_NBYTES) -> str:
    """Text of a regular UTF-8 file of at most ``limit`` bytes.

    Raises:
        OSError: as ``read_bytes``.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, limit).decode("utf-8")


def parse_json(text: str) -> Any:  # Any: JSON
    """Parse JSON with one kind of error; an object with one key twice is refused.

    Raises:
        ValueError: the text is no JSON, is nested too deep, or has a number too long or a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def parse_toml(text: str) -> Any:  # Any: TOML
    """Parse TOML with one kind of error. Some editors begin a file with a byte order mark: it is passed over.

    Raises:
        ValueError: the text is no TOML, is nested too deep, or has a number too long.
    """
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"has the key {shown(twice)} twice")
    return found


def reason(error: OSError | ValueError) -> str:
    """What is wrong by an OSError, without its path and number."""
    if isinstance(error, UnicodeDecodeError):
        return "is no UTF-8 text"
    if isinstance(error, OSError):
        return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return str(error)


def answer(
    command: Sequence[str], limit_s: float, folder: Path | None = None
) -> subprocess.CompletedProcess[str] | None:
    """What another program says in ``folder``; None where it is not installed, or does not end within ``limit_s``."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    try:
        return subprocess.run(command, timeout=limit_s, cwd=folder, **how)
    except (OSError, subprocess.TimeoutExpired):
        return None


class Closing:
    """A context that closes itself at its end."""

    def close(self) -> None:
        """Give everything back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Explained:
    """Context: an error of the system becomes an ``error`` with ``text``, in which ``WHY`` stands for its reason."""

    def __init__(self, error: type[Exception], text: str) -> None:
        self._error, self._text = error, text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if (
            type(error) is RuntimeError
        ):  # torch.save ends its file on a full disk, and that fails too
            error = error.__context__
        if isinstance(error, OSError):
            raise self._error(self._text.replace(WHY, reason(error))) from error


def shown(value: object) -> str:
    """``repr`` for a message, cut where it is long: a damaged file may hold anything."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of very many digits"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
