"""The command to type to train from imported weights, as far as the weights tell.

Owns: which of them hpczero.train can train, and the words. Must not know: values, models in torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import Manifest
from hpczero.checkpoint.places import CHECKPOINTS
from hpczero.options.config import TrainOptions

BYTE_VOCAB = 257  # of the text that a run takes where none is named
FFN_MULTIPLE = 4  # of all presets; it is no option

_UNTOLD = {
    "HEADS": "HEADS, its number of attention heads",
    "CONTEXT": "CONTEXT, the tokens in a sequence",
    "TOKENS.h5": "TOKENS.h5, a token file",
}


def how_to_train(path: Path) -> str:
    """A line for people: the command that begins at the imported checkpoint ``path``, or why there is none.

    The run that it begins is written to another folder.
    """
    manifest = read_manifest(path)
    model = manifest.meta["extra"].get("model", {})
    fault = _fault(manifest)
    if fault:
        return (
            f"hpczero.train cannot train it: {fault}; hpczero.checkpoint.load brings it into a model of your own that "
            "has these names and shapes"
        )
    place = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    words = ["python", "-m", "hpczero.train", "--run.name", f"{place.resolve().name}-trained"]
    shapes = {row.name: row.shape for row in manifest.table.owners}
    for name, value in _sizes(shapes, model).items():
        words += [f"--model.{name}", str(value)]
    vocab_size = shapes[gpt2.TABLE][0]
    if vocab_size != BYTE_VOCAB:
        words += ["--data.path", "TOKENS.h5"]
    if manifest.step >= TrainOptions().steps:
        words += ["--train.steps", str(manifest.step + TrainOptions().steps)]
    typed = shlex.join([*words, "--resume.from", os.fspath(path)])
    untold = [text for word, text in _UNTOLD.items() if word in words]
    if not untold:
        return f"to train from it: {typed}"
    more = f" of its vocabulary of {vocab_size:,} ids" if "TOKENS.h5" in words else ""
    return f"to train from it, put in what it does not tell ({'; '.join(untold)}{more}): {typed}"


def _fault(manifest: Manifest) -> str:
    """Why hpczero.train has no such model; empty if it has one."""
    shapes = {row.name: row.shape for row in manifest.table.owners}
    rows = manifest.table.rows
    tied = {row.name: rows[row.tied_to].name for row in rows if row.tied_to is not None}
    expected = gpt2.expected_shapes(shapes)
    head = expected.pop(gpt2.HEAD)
    if "wpe.weight" not in shapes:
        del expected["wpe.weight"]
    if shapes == {**expected, gpt2.HEAD: head} and shapes[gpt2.TABLE] == head:
        return (
            f"{gpt2.HEAD} is a parameter of its own, and there it is tied to {gpt2.TABLE} (where the two are equal, "
            f"import with --tied {gpt2.HEAD}={gpt2.TABLE})"
        )
    buffers = manifest.meta["buffers"]
    if shapes != expected or tied != {gpt2.HEAD: gpt2.TABLE} or buffers or not _sized(shapes):
        return "its parameters are not those of the GPT there"
    hidden, ffn = shapes[gpt2.TABLE][1], shapes["blocks.0.mlp.expansion.weight"][0]
    if ffn != FFN_MULTIPLE * hidden:
        return f"its MLP is {ffn} wide, and there it is {FFN_MULTIPLE * hidden}"
    return ""


def _sized(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return "blocks.0.mlp.expansion.weight" in shapes and all(map(all, shapes.values()))


def _sizes(shapes: Mapping[str, tuple[int, ...]], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the model. Words in capitals stand for those that neither shapes nor ``model`` tell."""
    learned = shapes.get("wpe.weight")
    return {
        "layers": sum(name.endswith(".attention.qkv.weight") for name in shapes),
        "hidden": shapes[gpt2.TABLE][1],
        "heads": model.get("heads", "HEADS"),
        "context": learned[0] if learned else model.get("context", "CONTEXT"),
        "positions": "learned" if learned else "rotary",
    }
