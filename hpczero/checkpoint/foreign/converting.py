"""Weights of other programs made into a checkpoint, from which a training then starts.

One process writes it, with one slab in memory. The checkpoint has no optimizer and no random streams; every rank that
loads it starts these anew.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.disk import h5file
from hpczero.checkpoint.disk.folder import Folder, place_for
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.disk.rawfile import manifest_of
from hpczero.checkpoint.foreign import weight_files
from hpczero.checkpoint.foreign.safe_file import KEY
from hpczero.checkpoint.foreign.weight_files import WeightFiles
from hpczero.errors import CheckpointMismatch, CheckpointNotWritten, ConfigError
from hpczero.files.direct import write_at
from hpczero.files.regular import parse_json

RUN_KEY = "hpczero"  # of the final weights of a run

logger = logging.getLogger("hpczero.checkpoint")

Array = npt.NDArray[Any]


def convert(
    path: Path,
    out: Path,
    *,
    layout: str | None = None,
    step: int = 0,
    tied: Mapping[str, str] | None = None,
    buffers: Sequence[str] = (),
) -> Path:
    """Write a checkpoint without an optimizer. Not collective.

    Args:
        path: as in ``import_weights``.
        out: the folder of an existing run, a folder of checkpoints, or ``step-...`` in it, which states the step. It
            holds no checkpoint yet. A folder of checkpoints is made if it does not exist.
        layout: as in ``import_weights``. None is ``hpczero``, and refuses names of Hugging Face's GPT-2, which are
            hardly meant so.
        step: optimizer steps done.
        tied: further names of parameters, each with the name that the weights have. Those that our own export or a
            torch file states, and the head of GPT-2, are known.
        buffers: patterns of names, as ``*.running_mean``. Tensors that are not floating point, and those that our own
            export states, are known to be buffers.

    Raises:
        ConfigError: ``out`` has checkpoints or says another step, there are no weights, or ``tied`` names what does not
            exist.
        CheckpointError: the weights cannot be read.
        CheckpointMismatch: they are not of the layout, or the layout must be given.
        CheckpointNotWritten: ``out`` cannot be written.
    """
    if step < 0:
        raise ConfigError(f"step: got {step}, expected 0 or above")
    weights = WeightFiles(path, layout=layout or "hpczero")
    if layout is None and gpt2.looks_like(weights):
        raise CheckpointMismatch(
            f"{path}: has names of Hugging Face's GPT-2, whose matrices lie the other way round; give --layout gpt2 to "
            "bring them into hpczero.models.GPT, which hpczero.train trains, or --layout hpczero to keep names and "
            "shapes as they are, for a model of your own that has them"
        )
    place, step = place_for(out, step)
    folder = Folder(place)
    _refuse_used(folder)
    weights.check()
    said, known_tied, known_buffers = _told(weights, layout or "hpczero")
    aliases = known_tied | weight_files.of_storage(weights) | dict(tied or {})
    patterns = (*known_buffers, *buffers)
    held = [name for name in weights if name not in aliases]
    names = [name for name in held if not _is_buffer(name, weights, patterns)]
    table = _table(weights, names, aliases)
    weight_files.check(weights, aliases)
    others = [name for name in held if name not in set(names)]
    if layout == "gpt2":
        _check_gpt2(weights, table, aliases, others)
    meta = _meta(path, said, [(name, weights[name]) for name in others])
    nbytes = sum(weights[name].numel * weights[name].dtype.itemsize for name in others)
    datasets = [
        on_disk.Dataset.of(on_disk.MASTER, "<f4", table.numel),
        on_disk.Dataset.of(on_disk.BUFFERS, "|u1", nbytes),
        on_disk.Dataset.of(on_disk.RNG, "|u1", 0),
    ]
    not_finite: list[str] = []
    content = {
        on_disk.MASTER: (piece.numpy() for piece in _pieces(weights, names, not_finite)),
        on_disk.BUFFERS: (_bytes(weights[name].whole()) for name in others),
        on_disk.RNG: iter(()),
    }
    folder.check_room(sum(dataset.nbytes for dataset in datasets))
    with Lock(place):
        _refuse_used(folder)  # again: another import may have come to its end since
        written = _write(folder, datasets, content, table, meta, step)
    if not_finite:
        logger.warning(
            "%s: has values that are infinite or no number, in %s; a model with them trains to nothing: compare the "
            "file with that of its source",
            path,
            on_disk.some(not_finite),
        )
    return written


def _pieces(
    weights: WeightFiles, names: Sequence[str], not_finite: list[str]
) -> Iterator[torch.Tensor]:
    """Values of the parameters ``names``.

    Names of those with a value that is not finite are added to ``not_finite``.
    """
    for name in names:
        for piece in weights[name].pieces(0, weights[name].numel):
            if name not in not_finite[-1:] and not bool(piece.isfinite().all()):
                not_finite.append(name)
            yield piece


def _refuse_used(folder: Folder) -> None:
    if folder.candidates():
        raise ConfigError(f"{folder.path}: holds checkpoints already; give a new folder")


def _write(
    folder: Folder,
    datasets: Sequence[on_disk.Dataset],
    content: Mapping[str, Iterator[Array]],
    table: on_disk.Table,
    meta: Mapping[str, Any],
    step: int,
) -> Path:
    temporary: Path | None = None
    try:
        temporary = folder.begin(step)
        state = temporary / on_disk.STATE_FILE
        placed, _ = h5file.create(state, datasets, table, meta, step=step)
        with state.open("r+b", buffering=0) as file:
            raw = file.fileno()
            written = [_fill(raw, dataset, content[dataset.name]) for dataset in placed]
            os.fsync(raw)
        # Of no rank, so that none looks for its random streams.
        manifest = manifest_of(
            state, written, step=step, world_size=0, table=table, meta=dict(meta)
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


def _fill(descriptor: int, dataset: on_disk.Dataset, pieces: Iterator[Array]) -> on_disk.Dataset:
    digests: list[str] = []
    for slab in _slabs(pieces, dataset):
        offset = dataset.offset + len(digests) * dataset.slab_numel * dataset.itemsize
        write_at(descriptor, offset, slab)
        digests.append(on_disk.digest(slab))
    assert len(digests) == dataset.num_slabs, f"{dataset.name}: {len(digests)} slabs"
    return replace(dataset, digests=tuple(digests))


def _slabs(pieces: Iterator[Array], dataset: on_disk.Dataset) -> Iterator[Array]:
    """The elements of ``pieces`` slab by slab; each slab is valid until the next one."""
    slab = np.empty(min(dataset.slab_numel, dataset.numel), dtype=dataset.dtype)
    filled = 0
    for piece in pieces:
        while len(piece):
            part, piece = np.split(piece, [len(slab) - filled])
            slab[filled : filled + len(part)] = part
            filled = (filled + len(part)) % len(slab)
            if not filled:
                yield slab
    if filled:
        yield slab[:filled]


# --- what the weights are ------------------------------------------------------------------------------------------


def _told(weights: WeightFiles, layout: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What ``extra`` gets of model, tokenizer, tied names and buffers, as far as the files state it."""
    if layout == "gpt2":
        return {"model": weights.model} if weights.model else {}, weight_files.of_gpt2(weights), []
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
    tokenizer = said.get("tokenizer")
    kept = {"model": model, "tokenizer": tokenizer if isinstance(tokenizer, str) else None}
    return {name: value for name, value in kept.items() if value}, tied, buffers


def _is_buffer(name: str, weights: WeightFiles, patterns: Sequence[str]) -> bool:
    floating = weights[name].dtype.is_floating_point
    return not floating or any(fnmatchcase(name, pattern) for pattern in patterns)


def _table(weights: WeightFiles, names: Sequence[str], aliases: Mapping[str, str]) -> on_disk.Table:
    known = set(names)
    lost = [(alias, name) for alias, name in aliases.items() if name not in known]
    if lost:
        alias, name = lost[0]
        if name in weights and not weights[name].dtype.is_floating_point:
            raise CheckpointMismatch(
                f"{weights.path}: cannot tie {alias} to {name}: that is {weights[name].dtype}, expected floating "
                "point; convert it"
            )
        raise ConfigError(
            f"{weights.path}: cannot tie {alias} to {name}: there is no such parameter; tie further names to one of "
            "the file"
        )
    return on_disk.Table.build([(name, weights[name].shape, 0) for name in names], aliases)


def _check_gpt2(
    weights: WeightFiles, table: on_disk.Table, aliases: Mapping[str, str], others: Sequence[str]
) -> None:
    shapes = {row.name: row.shape for row in table.rows}
    expected = gpt2.expected_shapes(shapes)
    missing = [gpt2.file_name(name) for name in expected if name not in {*shapes, *others}]
    faults = [f"there is no {on_disk.some(missing)}"] if missing else []
    foreign = [name for name in (*shapes, *others) if name not in expected]
    if foreign:
        faults.append(f"GPT-2 has no {on_disk.some(foreign)}")
    unlike = [
        f"{gpt2.file_name(name)} is {weights[name].dtype}, expected floating point"
        for name in others
        if name in expected
    ]
    unlike += [
        f"{gpt2.file_name(name)} is {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    unlike += [
        f"config.json says {name} {weights.model[name]}, and the tensors {size}"
        for name, size in gpt2.sizes_of(expected).items()
        if not missing and name in weights.model and weights.model[name] != size
    ]
    faults += unlike[: on_disk.NAMED]
    if faults and 2 * len(missing) < len(expected):
        raise CheckpointMismatch(
            f"{weights.path}: no GPT-2 as hpczero.models.GPT computes it: {'; '.join(faults)}; bring all tensors of "
            "one GPT-2 and no others, in floating point, or give --layout hpczero for a model of your own"
        )
    if faults:
        raise CheckpointMismatch(
            f"{weights.path}: weights of another model than GPT-2: {'; '.join(faults)}; give --layout hpczero"
        )


def _meta(
    path: Path, extra: Mapping[str, Any], buffers: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    return {
        "optimizer": None,
        "buffers": [[n, str(h.dtype).removeprefix("torch."), list(h.shape)] for n, h in buffers],
        "rng": [],
        "loss_scale": {"scaled": False, "scale": 1.0, "good_steps": 0},
        "skipped_steps": 0,
        "stage": 0,
        "precision": "fp32",
        "extra": dict(extra),
        "provenance": {"imported": str(path.resolve())} | on_disk.programs(),
    }


def _bytes(tensor: torch.Tensor) -> Array:
    found: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found
