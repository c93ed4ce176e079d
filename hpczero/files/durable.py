"""Files that appear whole or not at all: written under a hidden name, and renamed once they are on disk."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from typing_extensions import Self

from hpczero.files.regular import is_there


def write_text(path: Path, text: str) -> None:
    """Replace a small file. A reader sees the old one or the new one, whole. ``sync`` its folder to keep its name."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    _put(path, write)


def copy(file: Path, to: Path) -> None:
    """Copy ``file`` with its content and times; otherwise as ``write_text``."""
    _put(to, lambda temporary: shutil.copy2(file, temporary))


def move(file: Path, to: Path) -> None:
    """Rename ``file``, also to another file system. There it exists twice for a moment, and never not at all."""
    try:
        file.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(file, to)
        sync(to.parent)
        file.unlink()


def keep_as(file: Path, name: Path) -> None:
    """Give ``file`` a second name in its folder, which stays when the first one is replaced."""
    try:
        os.link(file, name)
    except OSError:  # some file systems have no links
        copy(file, name)


def remove_left_over(folder: Path, names: Sequence[str], *, age_s: float) -> None:
    """Remove what a killed process has left of writing ``names`` in ``folder``, if it is that old. Never raises."""
    left = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[0-9a-f]{{8}}")
    remove_old(folder, left, age_s=age_s)


def remove_old(folder: Path, named: re.Pattern[str], *, age_s: float) -> None:
    """Remove files in ``folder`` with such names that nobody has written to for so long. Never raises."""
    with suppress(OSError):  # it is only for tidiness
        for entry in list(folder.iterdir()):
            if named.fullmatch(entry.name):
                with suppress(OSError):  # somebody else has removed it, or keeps it
                    if time.time() - entry.lstat().st_mtime > age_s:
                        entry.unlink()


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it. Of a link to a folder, only the link is removed.

    Raises:
        OSError: something in it cannot be removed.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def sync(folder: Path) -> None:
    """Return when the names in a folder, or the content of a file, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(temporary)
        sync(temporary)  # first: a rename may reach the disk before the content does
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Hidden:
    """A context manager, inside of which the file or folder is made at ``path``.

    Attributes:
        path: under a hidden name, in the folder where it will be.
    """

    def __init__(self, name: Path) -> None:
        """Nothing is written.

        Args:
            name: of the file or folder.
        """
        self._name = name.absolute()
        self.path = self._name.with_name(f".{self._name.name}.{secrets.token_hex(4)}")

    def commit(self) -> None:
        """Give it its name. A file there is replaced, and so is an empty folder.

        Raises:
            OSError: it is not on the disk, or cannot be renamed.
        """
        if self.path.is_dir():
            for entry in self.path.rglob("*"):
                if entry.is_file() or entry.is_dir():
                    sync(entry)
        sync(self.path)  # first: a rename may reach the disk before the content does
        self.path.rename(self._name)
        with suppress(OSError):  # it is there; whoever makes it again is told so
            sync(self._name.parent)

    def __enter__(self) -> Self:
        """Make the folder in which it will be. Raises OSError: it cannot be made."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(OSError):  # never made, committed, or the error that ends it
                os.unlink(self.path)


def is_free(folder: Path) -> bool:
    """Whether a folder can be made there: nothing is, or an empty folder. Raises OSError: it cannot be looked at."""
    return not is_there(folder) or (folder.is_dir() and not any(folder.iterdir()))
