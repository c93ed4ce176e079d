"""What a run sets aside when it goes back: checkpoints of its folder that are not of its line.

A line is the checkpoints of a run, each the successor of the one before. A folder has one line, in ``step-...``.
Checkpoints of another line are kept in a folder ``aside-<time>``. Nothing reads that folder unless it is named, and
nothing deletes it.

[Note: One rename decides]
Several renames are not atomic together. A note therefore says first which checkpoints go where, and from when on: at
once, or from the rename that brings in the first checkpoint of the new line, which is known by its manifest. From then
on the checkpoints do not count, wherever they lie. The next holder of the lock finishes the renames of a note in force,
and discards any other note.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpczero.checkpoint.disk.format import MANIFEST_FILE, step_folder, step_of_folder
from hpczero.errors import CorruptCheckpoint
from hpczero.files.durable import sync
from hpczero.files.regular import read_bytes

NOTE = ".setting-aside"
NOTE_NBYTES = 2**24

REPLACED = re.compile(r"\.replaced-(step-\d+)-[0-9a-f]{8}")
TEMPORARY = re.compile(r"\.tmp-step-\d+-[0-9a-f]{8}")
_ASIDE = re.compile(r"aside-\d{8}T\d{6}Z(-\d+)?")


def step_of(name: str) -> int | None:
    """The step of a folder whose name is that of a checkpoint; None for any other."""
    replaced = REPLACED.fullmatch(name)
    return step_of_folder(replaced[1] if replaced else name)


def strangers(
    found: Sequence[Path], *, step: int, origin: int | None, keep: int | None
) -> list[Path]:
    """Those of ``found`` that are not of a model's line, which has or is to have a checkpoint at ``step``.

    ``origin`` is the step of the checkpoint in this folder that the model was last loaded from or saved to. With
    ``keep`` the folder is a run's, so everything in it that is not of this line goes to the side. In any other folder
    the user may keep what he likes below ``step``.
    """
    if origin is not None and origin <= step:
        return [path for path in found if (step_of(path.name) or 0) > origin]
    return [path for path in found if keep is not None or (step_of(path.name) or 0) >= step]


@dataclass(frozen=True)
class Note:
    """What is being set aside in a folder of checkpoints.

    Attributes:
        folder: name of the folder it goes to.
        names: names of the checkpoints, where they lie now and in ``folder``.
        target: checkpoint that the new line begins with; empty if the move is decided without one.
        manifest: SHA-256 of the target's manifest.
    """

    folder: str
    names: Mapping[str, str]
    target: str = ""
    manifest: str = ""

    def in_force(self, path: Path) -> bool:
        """Whether the checkpoints that it names have ceased to count ([Note: One rename decides]).

        Raises:
            OSError: the manifest cannot be read, so it is unknown. To take it for missing would undo a decision.
        """
        if not self.target:
            return True
        try:
            found = read_bytes(path / self.target / MANIFEST_FILE)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return hashlib.sha256(found).hexdigest() == self.manifest


def hidden(path: Path) -> frozenset[str]:
    """Names in the folder ``path`` that do not count, because they are being set aside.

    Raises:
        CorruptCheckpoint: the note cannot be read.
        OSError: the manifest that decides cannot be read.
    """
    note = read_note(path)
    return frozenset(note.names) if note is not None and note.in_force(path) else frozenset()


def read_note(path: Path) -> Note | None:
    """The note in the folder ``path``, if there is one.

    Raises:
        CorruptCheckpoint: it cannot be read, so it is unknown which checkpoints count.
    """
    file = path / NOTE
    if not os.path.lexists(file):
        return None
    try:
        text, _, digest = read_bytes(file, NOTE_NBYTES).decode().rpartition("\n")
        if digest != _digest(text):
            raise ValueError("it is not what was written")
        return Note(**json.loads(text))
    except FileNotFoundError:
        return None  # just finished
    except (OSError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(
            f"{file}: does not say any more which checkpoints a run that was killed was setting aside ({error}). Move "
            "those that are not of the run's last line to another folder, and remove this file"
        ) from error


def asides(path: Path) -> list[Path]:
    """Folders of checkpoints in ``path`` that were set aside, newest first."""
    try:
        found = [entry for entry in path.iterdir() if _ASIDE.fullmatch(entry.name)]
    except OSError:
        return []
    return sorted((entry for entry in found if os.path.isdir(entry)), reverse=True)


def new_aside(path: Path) -> Path:
    """Make a folder in ``path`` for what is set aside now."""
    name = time.strftime("aside-%Y%m%dT%H%M%SZ", time.gmtime())
    number = 1
    while True:
        place = path / (name if number == 1 else f"{name}-{number}")
        try:
            place.mkdir()
            return place
        except FileExistsError:
            number += 1


def note_text(place: Path, found: Iterable[Path], *, target: str = "", manifest: str = "") -> str:
    """The text of a note: ``found`` go to ``place`` once ``target`` exists with a manifest of the text ``manifest``.

    The last line is the SHA-256 of the lines before, so a note that was changed does not count.
    """
    names: dict[str, str] = {}
    for path in found:
        plain = step_folder(step_of(path.name) or 0)
        names[path.name] = path.name if plain in names.values() else plain
    note = Note(place.name, names, target, _digest(manifest) if target else "")
    text = json.dumps(asdict(note))
    return f"{text}\n{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def finish(path: Path) -> Path | None:
    """Do what the note in ``path`` says if it is in force; discard it otherwise. The caller holds the folder's lock.

    Returns:
        Where the checkpoints are now; None if nothing was set aside.

    Raises:
        OSError: they cannot be renamed, or the manifest that decides cannot be read.
        CorruptCheckpoint: the note cannot be read.
    """
    note = read_note(path)
    if note is None:
        return None
    place = path / note.folder
    decided = note.in_force(path)
    if decided:
        place.mkdir(exist_ok=True)
        for name, new in note.names.items():
            if (path / name).is_symlink():
                _move_link(path / name, place / new, note.names)
            elif (path / name).is_dir():
                (path / name).rename(place / new)
        sync(place)
        sync(path)
    (path / NOTE).unlink()
    sync(path)
    return place if decided else None


def _move_link(link: Path, to: Path, moved: Mapping[str, str]) -> None:
    """Move a link to a checkpoint so that it leads to the same one, even if that one is among ``moved``."""
    target = link.parent.resolve() / link.readlink()
    beside = target.parent.resolve() == link.parent.resolve() and target.name in moved
    if to.is_symlink():  # a job was killed before it had taken the old one away
        to.unlink()
    to.symlink_to(moved[target.name] if beside else target)
    os.unlink(link)


def homes(path: Path) -> frozenset[Path]:
    """Folders whose line has the checkpoint ``path``: that of its name and, through links, that of its data."""
    data = path.resolve().parent
    return frozenset((data, path.parent.resolve()) if step_of(path.name) is not None else (data,))
