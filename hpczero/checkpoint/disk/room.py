"""Whether a file system has room for what is to be written.

Owns: how much must be free, and saying so in numbers that differ. Must not know: what is written.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hpczero.errors import CheckpointNotWritten

SPARE_NBYTES = 64 * 2**20
SHOWN = 10  # of a unit, at least: less of it is shown in a smaller one


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse a save of ``nbytes`` that cannot succeed.

    Args:
        folder: made if it does not exist.
        nbytes: size of the checkpoint in bytes.

    Raises:
        CheckpointNotWritten: the folder cannot be written, or there is no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch(exist_ok=False)
        probe.unlink()
        system = os.statvfs(folder)
    except OSError as error:
        raise CheckpointNotWritten(
            f"{folder}: cannot be written ({os.strerror(error.errno or 0)}); check the path, its permissions "
            "and the quota"
        ) from error
    free = system.f_bavail * system.f_frsize
    needed = int(nbytes * 1.05) + min(nbytes, SPARE_NBYTES)
    if free < needed:
        there, wanted = in_one_unit(free, needed)
        raise CheckpointNotWritten(
            f"{folder}: {there} are free and the checkpoint needs {wanted}; free some, keep fewer "
            "(--checkpoint.keep), or use another folder"
        )


def in_one_unit(free: int, needed: int) -> tuple[str, str]:
    """Both sizes in the largest unit that shows which is more; the second without the unit's name."""
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        down, up = free // unit, -(-needed // unit)
        if down < up and all(n == 0 or n >= SHOWN * unit for n in (free, needed)):
            return f"{down:,} {name}", f"{up:,}"
    return f"{free:,} bytes", f"{needed:,}"
