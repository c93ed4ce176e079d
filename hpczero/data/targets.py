"""What a new token file may replace: an older one that it is not made of.

Owns: telling a token file, sound or damaged, from anything else. Must not know: how one is read or written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpczero.data.appendix import FORMAT, LINE_NBYTES
from hpczero.data.tokens import SIGNATURE
from hpczero.errors import DataError
from hpczero.files.regular import kind_of, open_regular, reason

HEAD_NBYTES = 2**16  # of a file; its format is said there

_WAY_OUT = "nothing was changed; give another name, or take it away yourself"


def check_target(path: Path, sources: Iterable[Path] = ()) -> None:
    """Refuse to write a token file to ``path`` if that would lose something else. A FIFO or device is not opened.

    Args:
        path: of the new file.
        sources: files that it is made of.

    Raises:
        DataError: the message says what is there.
    """
    try:
        kind = kind_of(path)
        if kind == "a directory":
            raise DataError(
                f"{path}: is a directory, expected the name of a token file; give one in it, such as "
                f"{path / 'tokens.h5'}, or give another name"
            )
        if kind == "a file" and _is_among(path, sources):
            raise DataError(f"{path}: is one of the texts it would replace; {_WAY_OUT}")
        if kind not in ("", "a file"):
            raise DataError(f"{path}: is {kind}, expected a token file or nothing; {_WAY_OUT}")
        if kind and not _is_token_file(path):
            raise DataError(f"{path}: is no token file, and would be replaced by one; {_WAY_OUT}")
    except FileNotFoundError:  # gone meanwhile
        return
    except OSError as error:
        raise DataError(
            f"{path}: cannot be looked at ({reason(error)}), so nobody knows what would be replaced; {_WAY_OUT}"
        ) from error


def _is_among(path: Path, sources: Iterable[Path]) -> bool:
    mine = path.stat()
    for source in sources:
        try:
            if os.path.samestat(mine, source.stat()):
                return True
        except FileNotFoundError:  # whoever reads it says so
            continue
    return False


def _is_token_file(path: Path) -> bool:
    """Whether a file was written as a token file. A damaged one is replaced by preparing it again."""
    descriptor = open_regular(path)
    try:
        head = os.pread(descriptor, HEAD_NBYTES, 0)
        line = os.pread(descriptor, LINE_NBYTES, max(os.fstat(descriptor).st_size - LINE_NBYTES, 0))
    finally:
        os.close(descriptor)
    name = FORMAT.encode()
    return head.startswith(SIGNATURE) and (name in head or line.startswith(name + b" "))
