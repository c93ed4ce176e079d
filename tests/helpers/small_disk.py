"""A file system of its own, on a disk and small, so that it can be filled and its free room counted.

Must not know: what any test looks for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path | None]:
    """An empty folder on an ext4 of ``nbytes`` below ``folder``; None where it cannot be mounted.

    Its end fails where a process still holds a file there.
    """
    image, disk = folder / "disk.img", folder / "disk"
    disk.mkdir()
    mounted = False
    if shutil.which("mkfs.ext4"):
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
        mount = ["mount", "-o", "loop", str(image), str(disk)]
        mounted = all(
            not subprocess.run(command, capture_output=True, check=False).returncode
            for command in (make, mount)
        )
    if not mounted:
        yield None
        return
    try:
        (disk / "scratch").mkdir()
        yield disk / "scratch"
    except BaseException:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
        raise
    else:
        done = subprocess.run(["umount", str(disk)], capture_output=True, text=True, check=False)
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)
        assert not done.returncode, f"somebody holds a file there: {done.stderr}"
    finally:
        image.unlink()


@contextmanager
def memory_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """``folder`` on a file system of ``nbytes`` in memory; skips the test where it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system: needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def free_nbytes(folder: Path) -> int:
    """Of its file system, once what was given back can be had again."""
    subprocess.run(["sync", "--file-system", str(folder)], check=True)
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def fill(folder: Path, left_nbytes: int) -> Path:
    """Leave ``left_nbytes``; the file that takes the rest."""
    free_nbytes(folder)
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        for chunk in (2**16, 2**12):
            with suppress(OSError):
                while True:
                    file.write(bytes(chunk))
        file.truncate(max(file.tell() - left_nbytes, 0))
    free_nbytes(folder)
    return filler
