"""Scratch: where contenders that need a disk put what they do not keep.

Owns: the folder. Must not know: contenders.
"""

from __future__ import annotations

from pathlib import Path

from scaling.evidence.record import HOME

BUFFERS = 5  # blocks of staging of each contender that stages


def scratch() -> Path:
    """A folder on the disk of this checkout; made if need be."""
    folder = HOME / "runs" / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
