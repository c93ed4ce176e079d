"""Weights: folders of whole weights as they take the place of earlier ones.

Owns: what of an earlier save goes, in which order, and what a killed save has left. Must not know: models, ranks. Rank
0 does it.

[Note: Killed between two files]
Programs find weights by one file: the single one, the index of several, or the file of an adapter. The earlier one
goes before anything else changes, and the new one comes last. In between nobody can load the folder, so nobody loads
files of two saves as one. What has not come yet lies in the hidden folder, which was whole before the first file was
moved.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from hpczero.files.durable import Hidden, sync
from hpczero.hf.files import ADAPTER_CONFIG, HIDDEN, INDEX, SINGLE

ADAPTER = "adapter_model.safetensors"
DOORS = (INDEX, SINGLE, ADAPTER, "adapter_model.bin")  # see [Note: Killed between two files]
CARD = "README.md"  # to which peft adds
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

logger = logging.getLogger("hpczero.hf")


def make_room(place: Path) -> None:
    """Remove what killed saves have left in ``place``."""
    for left in (place / HIDDEN, *place.glob(f".{HIDDEN}.*")):
        shutil.rmtree(left, ignore_errors=True)


def write_hidden(place: Path, write: Callable[[str], None]) -> None:
    """Have ``write`` fill the hidden folder of ``place``, given its path; it is there whole or not at all."""
    with Hidden(place / HIDDEN) as hidden:
        hidden.path.mkdir()
        if (place / CARD).is_file():
            shutil.copy2(place / CARD, hidden.path)
        write(str(hidden.path))
        hidden.commit()


def bring_in(place: Path) -> None:
    """Move what the hidden folder of ``place`` holds to where an earlier save may be, and checkpoints beside it.

    A job that is killed meanwhile leaves the earlier save, the new one, or a folder that nobody can load.

    Args:
        place: the folder.
    """
    hidden = place / HIDDEN
    new = sorted(
        each.relative_to(hidden)
        for each in hidden.rglob("*")
        if each.is_symlink() or not each.is_dir()
    )
    doors = [each for each in new if each.name in DOORS]
    is_model = any(str(each) in (SINGLE, INDEX) for each in new)
    for door in (*doors, *(map(Path, (INDEX, SINGLE)) if is_model else ())):
        (place / door).unlink(missing_ok=True)
    sync(place)  # before a new file is there
    if is_model:
        for old in list(place.iterdir()):
            if _PART.fullmatch(old.name):
                old.unlink()
    for each in sorted(new, key=lambda name: name in doors):
        if each in doors:
            sync(place)
        (place / each).parent.mkdir(parents=True, exist_ok=True)
        (hidden / each).replace(place / each)
    shutil.rmtree(hidden)
    sync(place)
    if is_model and (place / ADAPTER_CONFIG).exists():
        logger.warning(
            "%s: holds %s of an earlier save, by which from_pretrained loads that adapter and its base instead of "
            "these weights; take it away",
            place,
            ADAPTER_CONFIG,
        )


def put_in_place(hidden: Path, target: Path) -> None:
    """Give a ``checkpoint-...`` its name, under which there may be an earlier one, which goes whole.

    What killed saves have left beside it goes too.
    """
    for left in target.parent.glob(".checkpoint-*"):
        if left != hidden:
            shutil.rmtree(left, ignore_errors=True)
    remove_whole(target)
    hidden.rename(target)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest ``checkpoint-...`` in ``folder`` as transformers does, each at once.

    Args:
        folder: of the trainer.
        limit: how many stay, at least the newest and the best; None and 0 remove none.
        best: path of the best one.
    """
    if limit is None or limit <= 0:
        return
    found = [Path(each) for each in sort_checkpoints(str(folder), use_mtime=True)]
    kept = {*found[-1:], *([] if best is None else [Path(best)])}
    number = max(0, len(found) - max(limit, len(kept)))
    for each in [each for each in found if each not in kept][:number]:
        remove_whole(each)


def remove_whole(folder: Path) -> None:
    """Remove a folder, which is not there under its name while files of it are."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
