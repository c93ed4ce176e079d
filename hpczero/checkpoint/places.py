"""Which checkpoints a path means that a user gave.

Owns: that all commands understand a run's folder, a folder of checkpoints and one checkpoint alike, and the message
where there is none. Must not know: MPI, what is in a checkpoint, other files of a run.
"""

from __future__ import annotations

from pathlib import Path

from hpczero.checkpoint.disk.folder import Folder, is_checkpoint
from hpczero.checkpoint.disk.format import Manifest, step_folder, step_of_folder
from hpczero.checkpoint.disk.lines import asides
from hpczero.errors import ConfigError
from hpczero.files.regular import kind_of, reason, shown

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
    if _kind(inner) != "a directory":
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
    found = Folder(folder_at(path)).candidates() if _kind(path) == "a directory" else []
    if not found:
        raise ConfigError(f"{path}: no checkpoint there: {what_is_there(path)}; {GIVE}")
    return found


def what_is_there(path: Path) -> str:
    """What ``path`` holds instead of checkpoints, for a message."""
    kind = _kind(path)
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


def is_imported(manifest: Manifest) -> bool:
    """Whether a checkpoint was made of another program's weights.

    It has no optimizer, and no training came before it.
    """
    provenance = manifest.meta.get("provenance")
    told = isinstance(provenance, dict) and "imported" in provenance
    return told and manifest.meta.get("optimizer") is None


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
    named = step_of_folder(path.name)
    if named is None:
        return folder_at(path), step
    if step not in (0, named):
        raise ConfigError(
            f"{path}: is the name of step {named}, and step is {step}; call it {step_folder(step)}, or leave "
            "the step out"
        )
    return path.parent, named


def _kind(path: Path) -> str:
    try:
        return kind_of(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be looked at ({reason(error)}); check the path and its permissions"
        ) from error


def given_path(directory: str | Path) -> Path:
    """As a path.

    Raises:
        ConfigError: no system has such a one.
    """
    if "\0" in str(directory):
        raise ConfigError(
            f"directory: got {shown(str(directory))}, which has a null character in its name; no system has such a path"
        )
    return Path(directory)
