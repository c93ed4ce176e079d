"""Weights: folders of whole weights as they take the place of earlier ones.

Owns: what of an earlier save goes. Must not know: models, ranks. Rank 0 does it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch


def bring_in(hidden: Path, place: Path, args: object) -> None:
    """Move what ``hidden`` holds into a folder that may hold an earlier save, and checkpoints beside it.

    Args:
        hidden: on the same file system; gone afterwards.
        place: the folder.
        args: training arguments, which transformers keeps beside weights.
    """
    new = {each.name for each in hidden.iterdir()}
    for pattern in ("model*.safetensors", "model*.safetensors.index.json"):
        for old in place.glob(pattern):
            if old.name not in new:  # of more files, or fewer
                old.unlink()
    for each in hidden.iterdir():
        each.replace(place / each.name)
    hidden.rmdir()
    torch.save(args, place / "training_args.bin")


def put_in_place(hidden: Path, target: Path) -> None:
    """Give a folder its name, under which there may be an earlier one."""
    shutil.rmtree(target, ignore_errors=True)
    hidden.rename(target)
