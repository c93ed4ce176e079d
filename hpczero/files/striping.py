"""Stripes: over how many storage targets a Lustre file system spreads the files of a folder.

Owns: the calls of Lustre's own tool, ``lfs``. Must not know: what the files are, MPI.

The layout of a file is settled when it is made, and is that of its folder. On other file systems ``lfs`` refuses, and
where there is no ``lfs`` nothing is called.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hpczero.errors import ConfigError

ALL = -1  # storage targets
SIZE_NBYTES = 16 * 2**20  # of a stripe: what a rank writes at once is contiguous, and longer
LIMIT_S = 60.0


@dataclass(frozen=True)
class Striping:
    """Layout of files that are made in a folder.

    Attributes:
        count: storage targets of one file, of a file as large as can be where that depends on it; ALL: every one.
        size_nbytes: bytes on one target before the next one's turn; 0 where nobody says.
    """

    count: int
    size_nbytes: int


def striping_of(folder: Path) -> Striping | None:
    """Layout of files that will be made in ``folder``; None where it is not on Lustre, or there is no ``lfs``.

    Args:
        folder: need not exist; then its nearest parent that does says it.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    done = _lfs("getstripe", "-d", str(there))
    if done is None or done.returncode:
        return None
    counts = re.findall(r"stripe_count:\s*(-?\d+)", done.stdout)
    sizes = re.findall(r"stripe_size:\s*(\d+)", done.stdout)
    if not counts:
        return None
    # Of a layout that grows with the file the last part is that of large files. 0: the file system's default, 1.
    return Striping(int(counts[-1]) or 1, int(sizes[-1]) if sizes else 0)


def stripe(folder: Path, count: int) -> None:
    """Have files that will be made in ``folder`` spread over ``count`` storage targets, or ALL.

    Args:
        folder: made if it is not there.
        count: above what the file system has, it takes all.

    Raises:
        ConfigError: ``folder`` is not on Lustre, or the file system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _lfs("setstripe", "-c", str(count), "-S", str(SIZE_NBYTES), str(folder))
    if done is None or done.returncode:
        said = (
            "there is no lfs on this host" if done is None else f"lfs said: {done.stderr.strip()}"
        )
        raise ConfigError(
            f"checkpoint.stripes: got {count}, but {folder} cannot be striped: {said}. Leave it at 0 where the folder "
            f"is not on Lustre, or type on a login node: {command(folder, count)}"
        )


def command(folder: Path, count: int) -> str:
    """What to type for ``stripe``."""
    return f"lfs setstripe -c {count} -S {SIZE_NBYTES // 2**20}M {folder}"


def _lfs(*words: str) -> subprocess.CompletedProcess[str] | None:
    """``lfs words...``; None where there is none, or a server does not answer it."""
    tool = shutil.which("lfs")
    if tool is None:
        return None
    try:
        return subprocess.run(
            [tool, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
