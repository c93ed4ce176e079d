"""The folder of checkpoints: what is in it, how one comes in, how old ones go.

Owns: names, the commit, retention. Must not know: MPI, HDF5, models. One rank does all of it.

A checkpoint is a folder ``step-...`` whose manifest states its own digest; nothing else is believed. A save writes
into a hidden folder, and one rename brings it in. What is to go is renamed first, so that half a folder never has a
name that counts. Files and folders that are not ours are left alone.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpczero.checkpoint.format import (
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    step_folder,
    step_of_folder,
)
from hpczero.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    ConfigError,
    CorruptCheckpoint,
)

LATEST = "LATEST"
SPARE_NBYTES = 64 * 2**20
STALE_S = 3600.0  # before what another job has left unfinished is taken away

_TEMPORARY = re.compile(r"\.tmp-step-\d+-[0-9a-f]{8}")
_TRASH = re.compile(r"\.trash-step-\d+-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.replaced-(step-\d+)-[0-9a-f]{8}")


class Folder:
    """One folder of checkpoints; it need not exist before the first save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- what is there

    def candidates(self) -> list[Path]:
        """Folders that may be checkpoints, newest first. One that is being replaced comes after its successor."""
        found = []
        for entry in self._entries():
            replaced = _REPLACED.fullmatch(entry.name)
            step = step_of_folder(replaced[1] if replaced else entry.name)
            if step is not None and entry.is_dir():
                found.append((step, replaced is None, entry))
        return [entry for _, _, entry in sorted(found, reverse=True)]

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be read ({os.strerror(error.errno or 0)}); check the path and its permissions"
            ) from error

    def valid(self) -> Iterator[tuple[Path, Manifest]]:
        """Checkpoints whose manifest and file size are right, newest first; their data is not read."""
        for path in self.candidates():
            with suppress(CorruptCheckpoint, CheckpointMismatch):
                yield path, read_manifest(path)

    # --- one comes in

    def check_room(self, nbytes: int) -> None:
        """Refuse a save that cannot succeed, before anything is written.

        Raises:
            CheckpointNotWritten: the folder cannot be written, or has no room for ``nbytes``.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{secrets.token_hex(4)}"
            probe.touch(exist_ok=False)
            probe.unlink()
            system = os.statvfs(self.path)
        except OSError as error:
            raise CheckpointNotWritten(
                f"{self.path}: cannot be written ({os.strerror(error.errno or 0)}); check the path, its permissions "
                "and the quota"
            ) from error
        free, needed = (
            system.f_bavail * system.f_frsize,
            int(nbytes * 1.05) + min(nbytes, SPARE_NBYTES),
        )
        if free < needed:
            raise CheckpointNotWritten(
                f"{self.path}: {free / 2**20:,.0f} MiB are free and the checkpoint needs {needed / 2**20:,.0f}; free "
                "some, keep fewer (--checkpoint.keep), or use another folder"
            )

    def begin(self, step: int) -> Path:
        """A new hidden folder for ``step``."""
        path = self.path / f".tmp-{step_folder(step)}-{secrets.token_hex(4)}"
        path.mkdir()
        return path

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Make what lies in ``temporary`` the checkpoint of its step. It is one from the rename on, never half.

        Raises:
            OSError: it cannot be written.
        """
        write_text(temporary / MANIFEST_FILE, manifest.to_json())
        sync(temporary)
        target = self.path / step_folder(manifest.step)
        replaced = None
        if (
            target.exists()
        ):  # the same step again, after going back: the old one counts until the new one does
            replaced = self.path / f".replaced-{target.name}-{secrets.token_hex(4)}"
            target.rename(replaced)
        temporary.rename(target)
        sync(self.path)
        write_text(self.path / LATEST, target.name + "\n")
        if replaced is not None:
            self.discard(replaced)
        return target

    # --- old ones go

    def retain(self, keep: int) -> None:
        """Leave the ``keep`` newest valid checkpoints, and take away what earlier saves have left.

        What is not valid does not count, and goes once a newer one is valid. Never raises: a save has succeeded.
        """
        with suppress(OSError, ConfigError):
            kept = [path for path, _ in self.valid()][: max(keep, 1)]
            for path in self.candidates():
                older = bool(kept) and _order(path) < _order(kept[0])
                if older and path not in kept:
                    self.discard(path)
            for entry in self._entries():
                if _TRASH.fullmatch(entry.name) or (
                    _TEMPORARY.fullmatch(entry.name) and _age_s(entry) > STALE_S
                ):
                    shutil.rmtree(entry, ignore_errors=True)

    def sweep(self) -> None:
        """Take away unfinished saves of whatever age; only where no other job can be saving. Never raises."""
        with suppress(OSError, ConfigError):
            for entry in self._entries():
                if _TEMPORARY.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)

    def discard(self, path: Path) -> None:
        """Take one checkpoint away."""
        trash = self.path / f".trash-{step_folder(_order(path)[0])}-{secrets.token_hex(4)}"
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _order(path: Path) -> tuple[int, bool]:
    replaced = _REPLACED.fullmatch(path.name)
    return step_of_folder(replaced[1] if replaced else path.name) or 0, replaced is None


def _age_s(path: Path) -> float:
    """Seconds since anything in ``path`` was written."""
    newest = path.stat().st_mtime
    for entry in path.iterdir():
        newest = max(newest, entry.stat().st_mtime)
    return time.time() - newest


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint ``path``, held against the size of its file.

    Raises:
        CorruptCheckpoint: it is missing, changed, or the file has another size.
        CheckpointMismatch: a later version wrote it.
    """
    try:
        text = (path / MANIFEST_FILE).read_text(encoding="utf-8")
        nbytes = (path / STATE_FILE).stat().st_size
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else "no text"
        name = getattr(error, "filename", None) or path / MANIFEST_FILE
        raise CorruptCheckpoint(f"{path}: {Path(name).name}: {reason}") from error
    try:
        manifest = Manifest.from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    if nbytes != manifest.file_nbytes:
        raise CorruptCheckpoint(
            f"{path}: {STATE_FILE} has {nbytes:,} bytes, expected {manifest.file_nbytes:,}"
        )
    return manifest


def write_text(path: Path, text: str) -> None:
    """Replace a small file; a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()  # first: fsync does not see what Python still holds
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(folder: Path) -> None:
    """Have the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
