"""The folder of checkpoints: what is in it, how a checkpoint comes in, how old checkpoints go. One rank does all of it.

A checkpoint is a folder ``step-...`` whose manifest states its own digest; nothing else counts as a checkpoint. A save
writes into a hidden folder, and one rename brings it in. A checkpoint that is to go is renamed first, so half a folder
never has a name that counts. Files and folders that are not ours are left alone.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.disk import lines
from hpczero.checkpoint.disk.lines import REPLACED, TEMPORARY, asides, step_of
from hpczero.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    ConfigError,
    CorruptCheckpoint,
)
from hpczero.files import durable
from hpczero.files.durable import sync, write_text
from hpczero.files.regular import (
    WHY,
    Explained,
    is_there,
    kind_of,
    opened,
    read_text,
    reason,
    shown,
)

SPARE_NBYTES = 64 * 2**20
SHOWN = 10  # of a unit, at least: less of it is shown in a smaller one


def in_one_unit(free: int, needed: int) -> tuple[str, str]:
    """Both sizes in the largest unit that shows which is more; the second without the unit's name."""
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        down, up = free // unit, -(-needed // unit)
        if down < up and all(n == 0 or n >= SHOWN * unit for n in (free, needed)):
            return f"{down:,} {name}", f"{up:,}"
    return f"{free:,} bytes", f"{needed:,}"


LATEST = "LATEST"
STALE_S = 3600.0  # before what another job has left unfinished is taken away

_LEFT = re.compile(r"\.probe-[0-9a-f]{8}|\.aside\.lock-[0-9a-f]{16}")
_TRASH = re.compile(r"\.trash-step-\d+-[0-9a-f]{8}")

logger = logging.getLogger("hpczero.checkpoint")


class Folder:
    """One folder of checkpoints; it need not exist before the first save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_sure = True  # that the name of the last one committed is on the disk

    # --- what is there

    def candidates(self) -> list[Path]:
        """Folders that may be checkpoints, newest first. One that is being replaced comes after its successor.

        Raises:
            ConfigError: the folder cannot be read.
            CorruptCheckpoint: a run was killed while it set checkpoints aside, and the note that says which cannot be
                read.
        """
        named = [entry for entry in self._entries() if step_of(entry.name) is not None]
        try:  # what nobody can look at is not taken for gone: a run would go on without it
            hidden = lines.hidden(self.path)
            found = [
                entry
                for entry in named
                if entry.name not in hidden and kind_of(entry) == "a directory"
            ]
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return sorted(found, key=lambda entry: (*_order(entry), entry.name), reverse=True)

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def valid(self) -> Iterator[tuple[Path, on_disk.Manifest]]:
        """Checkpoints whose manifest and file size are right, newest first; their data is not read."""
        for path in self.candidates():
            with suppress(CorruptCheckpoint, CheckpointMismatch):
                manifest = read_manifest(path)
                if not misnamed(path, manifest):
                    yield path, manifest

    # --- one comes in

    def check_room(self, nbytes: int) -> None:
        """Refuse a save of ``nbytes`` that cannot succeed; the folder is made if it does not exist.

        Raises:
            CheckpointNotWritten: the folder cannot be written, or there is no room.
        """
        with Explained(
            CheckpointNotWritten,
            f"{self.path}: cannot be written ({WHY}); check the path, its permissions and the quota",
        ):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{secrets.token_hex(4)}"
            probe.touch(exist_ok=False)
            probe.unlink()
            system = os.statvfs(self.path)
        free = system.f_bavail * system.f_frsize
        needed = int(nbytes * 1.05) + min(nbytes, SPARE_NBYTES)
        if free < needed:
            there, wanted = in_one_unit(free, needed)
            raise CheckpointNotWritten(
                f"{self.path}: {there} are free and the checkpoint needs {wanted}; free some, keep fewer "
                "(--checkpoint.keep), or use another folder"
            )

    def begin(self, step: int) -> Path:
        """Make a hidden folder for ``step``."""
        path = self.path / f".tmp-{on_disk.step_folder(step)}-{secrets.token_hex(4)}"
        path.mkdir()
        return path

    def commit(
        self,
        temporary: Path,
        manifest: on_disk.Manifest,
        *,
        others: Sequence[Path] = (),
        at: Callable[[str], None] = lambda name: None,
    ) -> Path:
        """Make what lies in ``temporary`` the checkpoint of its step, by one rename.

        ``others`` are checkpoints of another line, which go to the side with that same rename. ``at`` is called with
        the name of every milestone.

        Raises:
            OSError: it cannot be written.
        """
        if os.path.lexists(self.path / lines.NOTE):
            self._tell(lines.finish(self.path))  # what could not be finished at the save before
        text = manifest.to_json()
        write_text(temporary / on_disk.MANIFEST_FILE, text)
        sync(temporary)
        target = self.path / on_disk.step_folder(manifest.step)
        replaced = self.path / f".replaced-{target.name}-{secrets.token_hex(4)}"
        try:
            if others:
                there = [replaced if path == target else path for path in others]
                self._note(lines.new_aside(self.path), there, target=target.name, manifest=text)
                at("noted")
            if others or target.exists():
                with suppress(OSError):  # first: it never names what is not there
                    (self.path / LATEST).unlink()
            if target.exists():
                # The same step again: the old one counts until the new one does.
                target.rename(replaced)
                at("replaced")
            temporary.rename(target)
        except BaseException:
            if temporary.exists():
                with suppress(OSError):
                    (self.path / lines.NOTE).unlink()
                self._point()
            raise
        try:
            self._is_sure = False
            sync(self.path)
            self._is_sure = True
        except OSError as error:  # it counts, whatever becomes of its name if the machine fails now
            logger.warning(
                "%s: is there, but may be lost if the machine fails (%s)", target, reason(error)
            )
        at("renamed")
        # It is decided; the next save finishes what is left
        with suppress(OSError, CheckpointError):
            if others and self._is_sure:
                self._tell(lines.finish(self.path))
            self._point()
            if target not in others and self._is_sure and replaced.exists():
                self.discard(replaced)
        return target

    # --- what is of another line goes to the side

    def set_aside(
        self,
        found: Sequence[Path],
        *,
        moved: Sequence[Path] = (),
        copied: Sequence[Path] = (),
        before: Callable[[], None] = lambda: None,
    ) -> Path:
        """Move ``found`` to where nothing takes them for checkpoints of this line, all or none.

        The caller holds the lock.

        Args:
            found: checkpoints of this folder.
            moved: files that go with them, if they exist.
            copied: files of which a copy goes with them.
            before: called once the files are kept, and before the move is decided.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        place = lines.new_aside(self.path)
        # Before it is decided: of the line that goes, nothing may be missing.
        for file in copied:
            if file.is_file():
                durable.copy(file, place / file.name)
        for file in moved:
            if file.is_file():
                durable.move(file, place / file.name)
        sync(place)
        sync(self.path)
        before()
        if found:
            self._note(place, found)
            self._point()
            lines.finish(self.path)
        self._tell(place)
        return place

    def _note(
        self, place: Path, found: Sequence[Path], *, target: str = "", manifest: str = ""
    ) -> None:
        text = lines.note_text(place, found, target=target, manifest=manifest)
        write_text(self.path / lines.NOTE, text)
        sync(self.path)

    def _tell(self, place: Path | None) -> None:
        if place is None:
            return
        steps = sorted({step_of(path.name) or 0 for path in Folder(place).candidates()})
        logger.warning(
            "%s: set aside in %s: what this run does not go on from (%s); it is kept, and counts no more",
            self.path,
            place.name,
            f"steps {', '.join(map(str, steps))}" if steps else "results without a checkpoint",
        )

    def _point(self) -> None:
        """Have LATEST name the newest checkpoint, or nothing. Never raises: it is for people."""
        with suppress(ConfigError, CheckpointError):
            found = self.candidates()
            try:
                if found:
                    write_text(self.path / LATEST, found[0].name + "\n")
                else:
                    (self.path / LATEST).unlink(missing_ok=True)
            except OSError as error:  # the checkpoints are there, and nothing reads this
                logger.warning("%s: %s", self.path / LATEST, reason(error))

    # --- old ones go

    def retain(self, keep: int, saved: Path | None = None) -> None:
        """Leave the ``keep`` newest valid checkpoints, and remove what earlier saves have left. Never raises.

        A damaged checkpoint does not count, and goes once a newer one is valid. One that a later version wrote, or that
        could not be read this time, does not count either, and stays. Nothing goes while the newest may not be on the
        disk.

        Args:
            keep: newest valid checkpoints that stay, at least one.
            saved: stays in any case.
        """
        if not self._is_sure:
            return
        with suppress(OSError, ConfigError, CheckpointError):
            kept: list[Path] = []
            for path in self.candidates():
                valid = _is_valid(path)
                if valid and len(kept) < max(keep, 1):
                    kept.append(path)
                elif (
                    valid is not None and kept and _order(path) < _order(kept[0]) and path != saved
                ):
                    self.discard(path)
            for entry in self._entries():
                if _TRASH.fullmatch(entry.name) or (
                    TEMPORARY.fullmatch(entry.name) and _age_s(entry) > STALE_S
                ):
                    shutil.rmtree(entry, ignore_errors=True)

    def sweep(self) -> None:
        """Finish what a killed job has left. Only for a caller that knows that no other job is saving.

        Checkpoints that it was setting aside go there, or stay if that was not decided. Its unfinished saves go, and
        its small files once they are old: jobs that ask for the lock make such files, too.

        Raises:
            CheckpointError: the note of what it was setting aside cannot be read, or this cannot be finished.
        """
        try:
            if os.path.lexists(self.path / lines.NOTE):
                self._tell(lines.finish(self.path))
        except OSError as error:
            raise CheckpointNotWritten(
                f"{self.path}: what an earlier job was setting aside cannot be moved ({error}); check the permissions"
            ) from error
        with suppress(OSError, ConfigError):
            for entry in self._entries():
                if TEMPORARY.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)
            durable.remove_left_over(self.path, (LATEST, lines.NOTE), age_s=STALE_S)
            durable.remove_old(self.path, _LEFT, age_s=STALE_S)
            for entry in lines.asides(self.path):
                with suppress(OSError):  # of a job that was killed before it had moved anything
                    entry.rmdir()
            if self._entries():
                self._point()

    def discard(self, path: Path) -> None:
        """Remove one checkpoint."""
        trash = self.path / f".trash-{on_disk.step_folder(_order(path)[0])}-{secrets.token_hex(4)}"
        path.rename(trash)
        with suppress(OSError):
            durable.remove(trash)


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint by what is in it, sound or not. Raises ConfigError: the system does not say."""
    try:
        return any(is_there(path / name) for name in (on_disk.MANIFEST_FILE, on_disk.STATE_FILE))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, NotADirectoryError):
        # A file on the way to it
        path = next(each for each in (path, *path.parents) if kind_of(each))
        return ConfigError(
            f"{path}: is {kind_of(path)}, expected a folder: a run, its checkpoints, or one of them. Weights of other "
            "programs: hpczero.checkpoint.import_weights"
        )
    return ConfigError(f"{path}: cannot be read ({reason(error)}); check path and permissions")


def _order(path: Path) -> tuple[int, bool]:
    return step_of(path.name) or 0, REPLACED.fullmatch(path.name) is None


def _is_valid(path: Path) -> bool | None:
    """Whether manifest and file size are right; None if this version cannot know, or the name has another step."""
    try:
        if misnamed(path, read_manifest(path)):
            return None
    except CheckpointMismatch:
        return None
    except CorruptCheckpoint as error:
        # A stale handle, or too many open files, says nothing of what is on the disk; a missing file does.
        why = error.__cause__
        return None if isinstance(why, OSError) and why.errno != errno.ENOENT else False
    return True


def _age_s(path: Path) -> float:
    newest = path.stat().st_mtime
    for entry in path.iterdir():
        newest = max(newest, entry.stat().st_mtime)
    return time.time() - newest


def misnamed(path: Path, manifest: on_disk.Manifest) -> str:
    """What is wrong with the name of a checkpoint, whose manifest says another step; empty if nothing is."""
    step = step_of(path.name)
    if step is None or step == manifest.step:
        return ""
    return (
        f"{path}: is named after step {step} and holds step {manifest.step}, so it was copied or renamed; "
        f"call it {on_disk.step_folder(manifest.step)} if it belongs here, or move it away"
    )


def read_manifest(path: Path) -> on_disk.Manifest:
    """The manifest of the checkpoint ``path``, compared with the size of its file.

    Raises:
        CorruptCheckpoint: it is missing or was changed, or the file has another size.
        CheckpointMismatch: a later version wrote it.
    """
    name = on_disk.MANIFEST_FILE
    try:
        text = read_text(path / name)
        name = on_disk.STATE_FILE
        with opened(path / name) as descriptor:
            nbytes = os.fstat(descriptor).st_size
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{path}: {name}: {reason(error)}") from error
    try:
        manifest = on_disk.Manifest.from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    if nbytes != manifest.file_nbytes:
        raise CorruptCheckpoint(
            f"{path}: {on_disk.STATE_FILE} has {nbytes:,} bytes, expected {manifest.file_nbytes:,}"
        )
    return manifest


CHECKPOINTS = "checkpoints"  # in the folder of a run
MOST_NAMES = 8  # in a message
GIVE = "give the folder of a run, its folder of checkpoints, or one step-... in that"


def folder_at(path: Path) -> Path:
    """The folder of checkpoints that ``path`` means, unless it is one checkpoint; the folder need not exist.

    Raises:
        ConfigError: the system does not say what is there.
        CorruptCheckpoint: as ``Folder.candidates``.
    """
    inner = path / CHECKPOINTS
    if kind_at(inner) != "a directory":
        return path
    # A program of the user's own may keep checkpoints in a folder beside one of this name.
    alone = not (Folder(inner).candidates() or asides(inner)) and Folder(path).candidates()
    return path if alone else inner


def checkpoints_at(path: Path) -> list[Path]:
    """Folders of the checkpoints that ``path`` may mean, best first: itself, or those in it.

    Raises:
        ConfigError: there is none, or the system does not say.
        CorruptCheckpoint: as ``Folder.candidates``.
    """
    if is_checkpoint(path):
        return [path]
    found = Folder(folder_at(path)).candidates() if kind_at(path) == "a directory" else []
    if not found:
        raise ConfigError(f"{path}: no checkpoint there: {what_is_there(path)}; {GIVE}")
    return found


def what_is_there(path: Path) -> str:
    """What ``path`` holds instead of checkpoints, for a message."""
    kind = kind_at(path)
    if kind != "a directory":
        return f"it is {kind}" if kind else "it does not exist"
    folder = folder_at(path)
    if folder == path:
        said = f"looked for step-..., and it holds {_names(path)}"
    else:
        said = f"looked for step-... in {folder}, which holds {_names(folder)}; {path} holds {_names(path)}"
    aside = asides(folder)
    return f"{said}; what was set aside has a path of its own, as {aside[0]}" if aside else said


def _names(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        return f"what cannot be listed ({reason(error)})"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}" if names else "nothing"


def is_imported(manifest: on_disk.Manifest) -> bool:
    """Whether a checkpoint was made of what another program wrote, so that no training of ours came before it."""
    provenance = manifest.meta.get("provenance")
    return isinstance(provenance, dict) and "imported" in provenance


def holds_imports_alone(path: Path) -> bool:
    """Whether a folder has checkpoints, and each was made of another program's weights.

    Raises:
        ConfigError: the folder cannot be read.
        CorruptCheckpoint: as ``Folder.candidates``.
    """
    folder = Folder(path)
    valid = [manifest for _, manifest in folder.valid()]
    return bool(valid) and len(valid) == len(folder.candidates()) and all(map(is_imported, valid))


def place_for(path: Path, step: int) -> tuple[Path, int]:
    """Where a new checkpoint goes: the folder of checkpoints, and its step.

    Args:
        path: the folder of an existing run, a folder of checkpoints, or the checkpoint itself, whose name states the
            step. The last two need not exist.
        step: the step that is asked for; 0 also if the name states it.

    Raises:
        ConfigError: the name states another step, or the system does not say what is there.
    """
    named = on_disk.step_of_folder(path.name)
    if named is None:
        return folder_at(path), step
    if step not in (0, named):
        raise ConfigError(
            f"{path}: is the name of step {named}, and step is {step}; call it {on_disk.step_folder(step)}, or leave "
            "the step out"
        )
    return path.parent, named


def kind_at(path: Path) -> str:
    """As ``kind_of``. Raises ConfigError: the system does not say."""
    with Explained(
        ConfigError, f"{path}: cannot be looked at ({WHY}); check the path and its permissions"
    ):
        return kind_of(path)


def given_path(directory: str | Path) -> Path:
    """As a path. Raises ConfigError: no system has such a one."""
    if "\0" in str(directory):
        raise ConfigError(
            f"directory: got {shown(str(directory))}, which has a null character in its name; no system has such a path"
        )
    return Path(directory)
