"""Which checkpoint a save may replace.

Owns: the refusal to lose more than is saved. Must not know: MPI, models.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpczero.checkpoint.base import META
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.snapshot import Snapshot
from hpczero.errors import CheckpointMismatch, ConfigError, CorruptCheckpoint


def check_replaced(path: Path, snapshot: Snapshot) -> None:
    """Refuse to replace the checkpoint ``path`` by less.

    That is by weights alone if it holds the state of an optimizer, or by trained parameters alone if it has frozen
    ones.

    Raises:
        ConfigError: it does.
    """
    if snapshot.meta.get(META) is not None:
        with suppress(CorruptCheckpoint, CheckpointMismatch):
            if any(row.frozen for row in read_manifest(path).table.rows):
                raise ConfigError(
                    f"{path}: holds frozen parameters too, and a checkpoint of the trained ones alone would take its "
                    "place; save to another directory or another step"
                )
    if snapshot.meta["optimizer"] is not None:
        return
    with suppress(CorruptCheckpoint, CheckpointMismatch):  # which nobody can go on from, or none
        saved = read_manifest(path).meta.get("optimizer")
        if saved is not None:
            raise ConfigError(
                f"{path}: holds the state of {saved['class']}, and this model was zeroified without an optimizer: a "
                "checkpoint of weights alone would take its place; save to another directory or another step"
            )
