"""Weights of other programs made into a checkpoint, which a training then starts from.

Owns: what such a checkpoint says, and writing it in one process with one slab in memory. Must not know: MPI, models.

It has no optimizer and no random streams: every rank that loads it starts those anew.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpczero.checkpoint import gpt2, h5file
from hpczero.checkpoint.folder import Folder
from hpczero.checkpoint.format import (
    BUFFERS,
    MASTER,
    NAMED,
    RNG,
    STATE_FILE,
    Dataset,
    Manifest,
    Table,
    digest,
)
from hpczero.checkpoint.lock import Lock
from hpczero.checkpoint.rawfile import rest_digest, write_at
from hpczero.checkpoint.safefile import KEY
from hpczero.checkpoint.weightfiles import WeightFiles
from hpczero.errors import CheckpointMismatch, CheckpointNotWritten, ConfigError
from hpczero.regularfile import parse_json

RUN_KEY = "hpczero"  # of the final weights of a run

Array = npt.NDArray[Any]


def convert(
    path: Path,
    out: Path,
    *,
    layout: str = "hpczero",
    step: int = 0,
    tied: Mapping[str, str] | None = None,
    buffers: Sequence[str] = (),
) -> Path:
    """Write ``out/step-...``: a checkpoint without an optimizer. Not collective.

    Args:
        path: as in ``import_weights``.
        out: folder of checkpoints that holds none yet; made if need be.
        layout: as in ``import_weights``.
        step: optimizer steps done.
        tied: further names of parameters, each with the name that the weights have; those that our own export or a
            torch file tells, and the head of GPT-2, are known.
        buffers: patterns of names, as ``*.running_mean``; tensors that are not floating point, and those that our own
            export tells, are known to be buffers.

    Raises:
        ConfigError: ``out`` has checkpoints, there are no weights, or ``tied`` names what is not there.
        CheckpointError: the weights cannot be read.
        CheckpointMismatch: they are not of the layout.
        CheckpointNotWritten: ``out`` cannot be written.
    """
    if step < 0:
        raise ConfigError(f"step: got {step}, expected 0 or above")
    weights, folder = WeightFiles(path, layout=layout), Folder(out)
    model, known_tied, known_buffers = _told(weights, layout)
    aliases = known_tied | _same_storage(weights) | dict(tied or {})
    _refuse_used(folder)
    weights.check()
    patterns = (*known_buffers, *buffers)
    held = [name for name in weights if name not in aliases]
    names = [name for name in held if not _is_buffer(name, weights, patterns)]
    table = _table(weights, names, aliases)
    others = [name for name in held if name not in set(names)]
    if layout == "gpt2":
        _check_gpt2(weights, table, aliases, others)
    meta = _meta(path, model, [(name, weights[name]) for name in others])
    nbytes = sum(weights[name].numel * weights[name].dtype.itemsize for name in others)
    datasets = [
        Dataset.of(MASTER, "<f4", table.numel),
        Dataset.of(BUFFERS, "|u1", nbytes),
        Dataset.of(RNG, "|u1", 0),
    ]
    content = {
        MASTER: (
            piece.numpy()
            for name in names
            for piece in weights[name].pieces(0, weights[name].numel)
        ),
        BUFFERS: (_bytes(weights[name].whole()) for name in others),
        RNG: iter(()),
    }
    folder.check_room(sum(dataset.nbytes for dataset in datasets))
    with Lock(out):
        _refuse_used(folder)  # again: another import may have come to its end since
        return _write(folder, datasets, content, table, meta, step)


def _refuse_used(folder: Folder) -> None:
    if folder.candidates():
        raise ConfigError(f"{folder.path}: holds checkpoints already; give a new folder")


def _write(
    folder: Folder,
    datasets: Sequence[Dataset],
    content: Mapping[str, Iterator[Array]],
    table: Table,
    meta: Mapping[str, Any],
    step: int,
) -> Path:
    temporary: Path | None = None
    try:
        temporary = folder.begin(step)
        state = temporary / STATE_FILE
        placed, _ = h5file.create(state, datasets, table, meta, step=step)
        descriptor = os.open(state, os.O_RDWR)
        try:
            written = [_fill(descriptor, dataset, content[dataset.name]) for dataset in placed]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        manifest = Manifest(
            step=step,
            created=_now(),
            world_size=0,  # so that no rank looks for its random streams
            table=table,
            datasets=tuple(written),
            file_nbytes=state.stat().st_size,
            rest=rest_digest(state, written),
            meta=dict(meta),
        )
        return folder.commit(temporary, manifest)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointNotWritten(
                f"{folder.path}: cannot be written ({error}); check space, quota and permissions"
            ) from error
        raise


def _fill(descriptor: int, dataset: Dataset, pieces: Iterator[Array]) -> Dataset:
    """Write a dataset slab by slab; returns it with the digests."""
    slab = np.empty(min(dataset.slab_numel, dataset.numel), dtype=dataset.dtype)
    digests: list[str] = []
    filled = 0

    def put() -> None:
        offset = dataset.offset + len(digests) * dataset.slab_numel * dataset.itemsize
        write_at(descriptor, offset, slab[:filled])
        digests.append(digest(slab[:filled]))

    for piece in pieces:
        begin = 0
        while begin < len(piece):
            count = min(len(piece) - begin, len(slab) - filled)
            slab[filled : filled + count] = piece[begin : begin + count]
            begin, filled = begin + count, filled + count
            if filled == len(slab):
                put()
                filled = 0
    if filled:
        put()
    assert len(digests) == dataset.num_slabs, f"{dataset.name}: {len(digests)} slabs"
    return replace(dataset, digests=tuple(digests))


# --- what the weights are ------------------------------------------------------------------------------------------


def _told(weights: WeightFiles, layout: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Fields of the model's configuration, tied names and buffers, as far as the files tell."""
    if layout == "gpt2":
        tied = weights.model.get("tie_embeddings", gpt2.HEAD not in weights)
        return weights.model, {gpt2.HEAD: gpt2.TABLE} if tied else {}, []
    try:
        said = parse_json(weights.metadata.get(KEY) or weights.metadata.get(RUN_KEY, "{}"))
        model, tied = dict(said.get("model", {})), dict(said.get("tied", {}))
        buffers = list(said.get("buffers", ()))
        if not all(isinstance(name, str) for name in (*tied.values(), *buffers)):
            raise TypeError("names are texts")
    except (ValueError, TypeError, AttributeError):  # not ours, whatever it is called
        return {}, {}, []
    if model.get("tie_embeddings") and gpt2.TABLE in weights and gpt2.HEAD not in weights:
        tied[gpt2.HEAD] = gpt2.TABLE
    return model, tied, buffers


def _same_storage(weights: WeightFiles) -> dict[str, str]:
    """Names of tensors that are the same memory, each with the first of them."""
    first: dict[Any, str] = {}
    found = {}
    for name, held in weights.items():
        if held.storage is not None and first.setdefault(held.storage, name) != name:
            found[name] = first[held.storage]
    return found


def _is_buffer(name: str, weights: WeightFiles, patterns: Sequence[str]) -> bool:
    floating = weights[name].dtype.is_floating_point
    return not floating or any(fnmatchcase(name, pattern) for pattern in patterns)


def _table(weights: WeightFiles, names: Sequence[str], aliases: Mapping[str, str]) -> Table:
    known = set(names)
    lost = [f"{alias} to {name}" for alias, name in aliases.items() if name not in known]
    if lost:
        raise ConfigError(
            f"{weights.path}: cannot tie {lost[0]}: there is no such parameter; tie further names to one of the file"
        )
    return Table.build([(name, weights[name].shape, 0) for name in names], aliases)


def _check_gpt2(
    weights: WeightFiles, table: Table, aliases: Mapping[str, str], others: Sequence[str]
) -> None:
    shapes = {row.name: row.shape for row in table.rows}
    expected = gpt2.expected_shapes(shapes)
    wrong = [
        *(name for name in expected if shapes.get(name) != expected[name]),
        *(name for name in (*shapes, *others) if name not in expected),
    ]
    if wrong:
        raise CheckpointMismatch(
            f"{weights.path}: weights of another model than GPT-2: {', '.join(wrong[:NAMED])} are missing, foreign "
            "or of another shape; give --layout hpczero"
        )


def _meta(
    path: Path, model: Mapping[str, Any], buffers: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """As a save writes it."""
    return {
        "optimizer": None,
        "buffers": [[n, str(h.dtype).removeprefix("torch."), list(h.shape)] for n, h in buffers],
        "rng": [],
        "loss_scale": {"scaled": False, "scale": 1.0, "good_steps": 0},
        "skipped_steps": 0,
        "stage": 0,
        "precision": "fp32",
        "extra": {"model": dict(model)} if model else {},
        "provenance": {
            "imported": str(path.resolve()),
            "host": socket.gethostname(),
            "created": _now(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def _bytes(tensor: torch.Tensor) -> Array:
    found: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
