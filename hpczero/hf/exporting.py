"""export: a checkpoint as a folder that transformers loads.

Owns: which model the checkpoint is of, and one tensor of it at a time. Must not know: MPI, units, formats of files. One
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpczero.checkpoint.disk.format import BUFFERS, MASTER, NAMED
from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign.exporting import of_newest
from hpczero.checkpoint.foreign.safe_file import DTYPES as SIZES
from hpczero.checkpoint.places import checkpoints_at
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.hf import building
from hpczero.hf.building import Choice, of_folder
from hpczero.hf.files import INDEX, SINGLE, WeightFolder
from hpczero.hf.matching import match, owners_of
from hpczero.hf.saving import NAMES, Stream, meta, write_beside
from hpczero.memory.buffers import DTYPES


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    like: str | Path,
    model_class: Any = None,
    tokenizer: Any = None,
    dtype: str = "fp32",
    shard_mib: int = 5120,
    trust_remote_code: bool = False,
    **changes: Any,
) -> None:
    """Write the weights of a checkpoint as a folder for ``from_pretrained``. Not collective: one process does it.

    Args:
        checkpoint: one, or the folder of checkpoints or of a run, of which the newest sound one is read.
        folder: must not exist, or be empty.
        like: the folder that the trained model was loaded from: its config.json, and the names in its files.
        model_class: as it was given to ``load``.
        tokenizer: as of ``save_pretrained``.
        dtype: of the parameters, ``fp32``, ``bf16`` or ``fp16``; they are rounded from the masters.
        shard_mib: most MiB of one file.
        trust_remote_code: as it was given to ``load``.
        changes: of the configuration, as they were given to ``load``.

    Raises:
        ConfigError: there is no checkpoint, something is at ``folder``, or an option is unknown.
        CheckpointMismatch: the checkpoint is of another model, or a value is beyond ``dtype``.
        CorruptCheckpoint: none is sound.
        CheckpointError: the folder cannot be written.
    """
    if dtype not in NAMES or shard_mib < 1:
        raise ConfigError(
            f"dtype, shard_mib: got {dtype!r} and {shard_mib}, expected one of {', '.join(NAMES)} and at least 1"
        )
    path, source = Path(checkpoint), Path(like)
    candidates = checkpoints_at(path)
    choice = Choice(model_class, changes, trust_remote_code)
    model: Any = building.build(lambda: of_folder(source, choice), seed=0)
    if (source / SINGLE).exists() or (source / INDEX).exists():
        model._weight_conversions = match(model, WeightFolder(source).entries).transforms

    def write(stored: Stored) -> None:
        tensors = _tensors(stored, model)
        stream = Stream(model, tensors, DTYPES[dtype])
        with stream.begin(Path(folder), shard_mib * 2**20):
            for pair in _parameters(stored, tensors):
                stream.put([pair])
            stream.commit(lambda place: write_beside(model, place, DTYPES[dtype], tokenizer))

    of_newest(path, candidates, write)


def _tensors(stored: Stored, model: Any) -> dict[str, Tensor]:
    """What stands for each parameter under all names of it, and persistent buffers with their values.

    Raises:
        CheckpointMismatch: the checkpoint is of another model; the message names parameters.
    """
    rows = stored.manifest.table.rows
    found: dict[str, Tensor] = {}
    for row in rows:
        if row.tied_to is None:
            found[row.name] = meta(row.shape, torch.float32)
    found |= {row.name: found[rows[row.tied_to].name] for row in rows if row.tied_to is not None}
    found |= dict(_buffers(stored))
    known = owners_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [name for name in shapes if shapes[name] != state.get(name)]
    wrong += [name for name, owner in known.items() if owner not in found and name not in found]
    if wrong:
        raise CheckpointMismatch(
            f"{stored.path}: not of the model that config.json describes: {', '.join(wrong[:NAMED])} differ; give "
            "like=, model_class= and fields of the configuration as they were when it was trained"
        )
    return found


def _parameters(stored: Stored, tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What stands for each parameter, and its whole fp32 value."""
    for row in stored.manifest.table.owners:
        values = torch.empty(row.numel, dtype=torch.float32, device="cpu")
        done = 0
        for piece in stored.read(MASTER, row.offset, row.offset + row.numel):
            values[done : done + len(piece)] = torch.from_numpy(np.ascontiguousarray(piece))
            done += len(piece)
        yield tensors[row.name], values.view(row.shape)


def _buffers(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name, dtype, shape in stored.manifest.meta["buffers"]:
        end = begin + prod(shape) * SIZES[dtype][1]
        data = np.empty(end - begin, dtype=np.uint8)
        done = 0
        for piece in stored.read(BUFFERS, begin, end):
            flat = np.ascontiguousarray(piece).view(np.uint8)
            data[done : done + len(flat)] = flat
            done += len(flat)
        kind: torch.dtype = getattr(torch, dtype)
        empty = torch.empty(shape, dtype=kind, device="cpu")
        yield name, torch.from_numpy(data).view(kind).view(shape) if len(data) else empty
        begin = end
