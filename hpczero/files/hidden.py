"""Hidden: a file or a folder that appears under its name whole, once it is on the disk, or not at all.

Owns: the hidden name beside it, the order of sync and rename, and that nothing stays after an error. Must not know:
what is in it. Small files are written by ``durable.write_text``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hpczero.files.durable import sync
from hpczero.files.regular import is_there


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
        """Make the folder in which it will be.

        Raises:
            OSError: it cannot be made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(OSError):  # never made, committed, or the error that ends it
                os.unlink(self.path)


def is_free(folder: Path) -> bool:
    """Whether a folder can be made there: nothing is, or an empty folder.

    Raises:
        OSError: it cannot be looked at.
    """
    return not is_there(folder) or (folder.is_dir() and not any(folder.iterdir()))
