"""What a run sets aside when it goes back: checkpoints of its folder that are not of its line.

Owns: which ones those are, where they go, and the note that makes it happen whole or not at all. Must not know: MPI,
models, what a checkpoint holds.

A line is the checkpoints of a run, each the successor of the one before. A folder has one: ``step-...``. What another
line has left there is kept in a folder ``aside-<time>``, which nothing reads unless told to, and nothing deletes.

[Note: One rename decides]
Several renames are not one. So a note says first which checkpoints go where, and from which moment on: at once, or from
the rename that brings in the first checkpoint of the new line, known by its manifest. From then on they do not count,
wherever they lie. Whoever has the lock next finishes the renames of a note in force, and throws away one that is not.
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
    """The step of a folder that counts as a checkpoint by its name; None if it does not."""
    replaced = REPLACED.fullmatch(name)
    return step_of_folder(replaced[1] if replaced else name)


def strangers(
    found: Sequence[Path], *, step: int, origin: int | None, keep: int | None
) -> list[Path]:
    """Those of ``found`` that are not of the line of a model, if it has, or is to have, a checkpoint at ``step``.

    Args:
        found: checkpoints of one folder.
        step: of the model.
        origin: step of the one in this folder that the model has come from: loaded, or saved there. None: of none.
        keep: as in ``save``. A folder in which old ones go is a run's, so everything there that is not of this line
            goes to the side; in any other one the user may keep what he likes, below ``step``.
    """
    if origin is not None and origin <= step:
        return [path for path in found if (step_of(path.name) or 0) > origin]
    return [path for path in found if keep is not None or (step_of(path.name) or 0) >= step]


@dataclass(frozen=True)
class Note:
    """What is being set aside in a folder of checkpoints.

    Attributes:
        folder: name of the folder it goes to.
        names: of the checkpoints, where they lie now and in ``folder``.
        target: checkpoint that the new line begins with; empty: it is decided without one.
        manifest: SHA-256 of its manifest.
    """

    folder: str
    names: Mapping[str, str]
    target: str = ""
    manifest: str = ""

    def in_force(self, path: Path) -> bool:
        """Whether what it names does not count any more. See [Note: One rename decides].

        Raises:
            OSError: the manifest cannot be read, so nobody knows. Taken for gone, a decision would be undone.
        """
        if not self.target:
            return True
        try:
            found = read_bytes(path / self.target / MANIFEST_FILE)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return hashlib.sha256(found).hexdigest() == self.manifest


def hidden(path: Path) -> frozenset[str]:
    """Names in the folder ``path`` that do not count: they are being set aside.

    Raises:
        CorruptCheckpoint: the note cannot be read.
        OSError: what decides cannot be read.
    """
    note = read_note(path)
    return frozenset(note.names) if note is not None and note.in_force(path) else frozenset()


def read_note(path: Path) -> Note | None:
    """The note in the folder ``path``, if there is one.

    Raises:
        CorruptCheckpoint: it cannot be read, so nobody knows which checkpoints count.
    """
    file = path / NOTE
    if not os.path.lexists(file):
        return None
    reason = "it is no such note"
    try:
        text, _, digest = read_bytes(file, NOTE_NBYTES).decode().rpartition("\n")
        if digest != _digest(text):
            raise ValueError("it is not what was written")
        said = json.loads(text)
        note = Note(said["folder"], dict(said["names"]), said["target"], said["manifest"])
        names = [name for pair in note.names.items() for name in pair]
        if (
            _ASIDE.fullmatch(note.folder) is not None
            and all(step_of(name) is not None for name in names)
            and (note.target == "" or step_of_folder(note.target) is not None)
        ):
            return note
    except FileNotFoundError:
        return None  # just finished
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error)
    raise CorruptCheckpoint(
        f"{file}: does not say any more which checkpoints a run that was killed was setting aside ({reason}). Move "
        "those that are not of the run's last line to another folder, and remove this file"
    )


def asides(path: Path) -> list[Path]:
    """Folders of checkpoints that were set aside in ``path``, newest first."""
    try:
        found = [entry for entry in path.iterdir() if _ASIDE.fullmatch(entry.name)]
    except OSError:
        return []
    return sorted((entry for entry in found if os.path.isdir(entry)), reverse=True)


def new_aside(path: Path) -> Path:
    """A folder in ``path`` for what is set aside now, made."""
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
    """The text of a note: ``found`` shall go to ``place``, once ``target`` is there with the text ``manifest``.

    The last line is the SHA-256 of those before: a note in which anything is changed is not believed.
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
    """Do what the note in ``path`` says, or throw it away. Under the lock of the folder only.

    Returns:
        Where they lie now; None if nothing was set aside.

    Raises:
        OSError: they cannot be renamed, or what decides cannot be read.
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
    """Move a link to a checkpoint, so that it leads to the same one, also where that is one of ``moved`` itself."""
    target = link.parent.resolve() / link.readlink()
    beside = target.parent.resolve() == link.parent.resolve() and target.name in moved
    if to.is_symlink():  # a job was killed before it had taken the old one away
        to.unlink()
    to.symlink_to(moved[target.name] if beside else target)
    os.unlink(link)


def homes(path: Path) -> frozenset[Path]:
    """Folders of whose line the checkpoint ``path`` is one: where its name is, and, through links, its data."""
    data = path.resolve().parent
    return frozenset((data, path.parent.resolve()) if step_of(path.name) is not None else (data,))
