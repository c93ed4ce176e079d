"""Weights of other programs made into a checkpoint, from which a training then starts.

Each rank writes its share, with one slab in memory. The checkpoint has the state of an optimizer where the weights come
with one, and no random streams; every rank that loads it starts anew what it has not.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
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
from hpczero.checkpoint.disk.stored import BUFFER_ITEMSIZES
from hpczero.checkpoint.foreign import dcp, universal, weight_files
from hpczero.checkpoint.foreign.collected import Collected, Weights, likely_tied
from hpczero.checkpoint.foreign.safe_file import KEY
from hpczero.checkpoint.foreign.weight_files import HeldTensor, WeightFiles
from hpczero.errors import CheckpointMismatch, CheckpointNotWritten, ConfigError
from hpczero.files.direct import write_at
from hpczero.files.regular import WHY, Explained, parse_json
from hpczero.job.long_work import Progress
from hpczero.job.team import Alone, Team

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
    optimizer: str | None = "AdamW",
    team: Team | None = None,
) -> Path:
    """Write a checkpoint of what another program wrote. Collective over the team.

    Args:
        path: as in ``import_weights``; or a folder of DCP, or a universal checkpoint of DeepSpeed, whose state of the
            optimizer is taken too.
        out: the folder of an existing run, a folder of checkpoints, or ``step-...`` in it, which states the step. It
            holds no checkpoint yet. A folder of checkpoints is made if it does not exist.
        layout: as in ``import_weights``. None is ``hpczero``, and refuses names of Hugging Face's GPT-2, which are
            hardly meant so.
        step: optimizer steps done; 0 where ``out`` or the state of the optimizer says it.
        tied: further names of parameters, each with the name that the weights have, or with itself where it is tied to
            none. Those that our own export or a torch file states, and the head of GPT-2, are known.
        buffers: patterns of names, as ``*.running_mean``. Tensors that are not floating point, and those that our own
            export states, are known to be buffers.
        optimizer: name of the class whose state it is, where there is one; None: the weights alone are taken.
        team: ranks that share the work; None: this process alone.

    Raises:
        ConfigError: ``out`` has checkpoints or says another step, there are no weights, or ``tied`` names what does not
            exist.
        CheckpointError: the weights cannot be read.
        CheckpointMismatch: they are not of the layout, or the layout must be given.
        CheckpointNotWritten: ``out`` cannot be written.
    """
    team = team or Alone()
    with team.agreed("look at the weights"):
        if step < 0:
            raise ConfigError(f"step: got {step}, expected 0 or above")
        weights = _opened(path, layout, with_state=optimizer is not None)
        place, step = place_for(out, step)
        folder = Folder(place)
        _refuse_used(folder)
    parts = max(len(weights), team.size)
    team.take_steps(
        "check the weights",
        (weights.check(part, parts) for part in range(team.rank, parts, team.size)),
    )

    def planned(progress: Progress) -> str:
        with progress.silent():
            found = _plan(weights, layout or "hpczero", step, tied or {}, buffers, optimizer or "")
        return json.dumps(found)

    plan = json.loads(team.by_root("look at the weights", planned))
    not_finite: list[str] = []
    with ExitStack() as stack:
        with team.agreed("lock the folder of checkpoints"):
            if team.rank == 0:
                folder.check_room(sum(dataset.nbytes for dataset in _datasets(plan)))
                stack.enter_context(Lock(place))
                _refuse_used(folder)  # again: another import may have come to its end since
        written = _write(folder, weights, plan, not_finite, team)
    found = [name for names in team.all_gather_lists(not_finite) for name in names]
    if found and team.rank == 0:
        logger.warning(
            "%s: has infinite or NaN values in %s; training from them fails: compare the file with that of its source",
            path,
            on_disk.some(list(dict.fromkeys(found))),
        )
    return written


def _opened(path: Path, layout: str | None, *, with_state: bool) -> Weights:
    if layout in (None, "hpczero"):
        with Explained(ConfigError, f"{path}: cannot be looked at: {WHY}"):
            if dcp.is_dcp(path):
                return dcp.DcpFolder(path, with_state=with_state)
            if universal.is_universal(path):
                return universal.UniversalFolder(path, with_state=with_state)
    weights = WeightFiles(path, layout=layout or "hpczero")
    if layout is None and gpt2.looks_like(weights):
        raise CheckpointMismatch(
            f"{path}: has names of Hugging Face's GPT-2, whose matrices lie the other way round; give --layout gpt2 to "
            "bring them into hpczero.models.GPT, which hpczero.train trains, or --layout hpczero to keep names and "
            "shapes as they are, for a model of your own that has them"
        )
    return weights


def _plan(
    weights: Weights,
    layout: str,
    step: int,
    tied: Mapping[str, str],
    buffers: Sequence[str],
    optimizer: str,
) -> dict[str, Any]:
    """What becomes of the weights, as JSON holds it. Reads some of them; one rank calls it."""
    said, known_tied, known_buffers = _told(weights, layout)
    state: dict[str, Any] | None = None
    places: Mapping[str, int] = {}
    if isinstance(weights, Collected):
        step = step or weights.step()
        state, places = weights.optimizer(optimizer)
        known_buffers = list(weights.known_buffers)
        patterns = (*known_buffers, *buffers)
        unknown = [name for name in weights if name not in {*places, *tied}]
        unknown = [name for name in unknown if not _is_buffer(name, weights, patterns)]
        known_tied = {**likely_tied(weights, unknown, places), **weights.known_tied}
        if weights.left:
            logger.warning(
                "%s: left out what is neither weight nor state of an optimizer: %s",
                weights.path,
                on_disk.some(weights.left),
            )
    aliases = known_tied | weight_files.of_storage(weights) | dict(tied)
    aliases = {alias: name for alias, name in aliases.items() if alias != name}
    patterns = (*known_buffers, *buffers)
    held = [name for name in weights if name not in aliases]
    names = [name for name in held if not _is_buffer(name, weights, patterns)]
    groups = {name: 0 if state is None else places.get(name, -1) for name in names}
    table = _table(weights, groups, aliases)
    weight_files.check(weights, aliases, weights.path)
    others = [name for name in held if name not in groups]
    if layout == "gpt2":
        _check_gpt2(weights, table, aliases, others)
    meta = _meta(weights.path, said, state, [(name, weights[name]) for name in others])
    return {"step": step, "table": table.to_json(), "meta": meta}


def _refuse_used(folder: Folder) -> None:
    if folder.candidates():
        raise ConfigError(f"{folder.path}: holds checkpoints already; give a new folder")


def _datasets(plan: Mapping[str, Any]) -> list[on_disk.Dataset]:
    table, meta = on_disk.Table.from_json(plan["table"]), plan["meta"]
    nbytes = sum(prod(s) * BUFFER_ITEMSIZES[dtype] for _, dtype, s in meta["buffers"])
    kinds = meta["optimizer"]["kinds"] if meta["optimizer"] else {}
    return [
        on_disk.Dataset.of(on_disk.MASTER, "<f4", table.numel),
        *(
            on_disk.Dataset.of(on_disk.STATE + key, "<f4", table.trainable_numel)
            for key, kind in kinds.items()
            if kind == "elements"
        ),
        on_disk.Dataset.of(on_disk.BUFFERS, "|u1", nbytes),
        on_disk.Dataset.of(on_disk.RNG, "|u1", 0),
    ]


def _write(
    folder: Folder,
    weights: Weights,
    plan: Mapping[str, Any],
    not_finite: list[str],
    team: Team,
) -> Path:
    """Write the checkpoint. Every rank writes its share of the slabs; rank 0 all else. Collective over the team."""
    step, table = plan["step"], on_disk.Table.from_json(plan["table"])
    text = f"{folder.path}: cannot be written ({WHY}); check space, quota and permissions"
    told = partial(Explained, CheckpointNotWritten, text)
    temporary: Path | None = None

    def begin(progress: Progress) -> str:
        nonlocal temporary
        with told(), progress.silent():
            temporary = folder.begin(step)
            state = temporary / on_disk.STATE_FILE
            placed, _ = h5file.create(state, _datasets(plan), table, plan["meta"], step=step)
        return json.dumps([str(temporary), [dataset.offset for dataset in placed]])

    def end(progress: Progress) -> str:
        found = sorted(entry for share in shares for entry in share)
        written = [
            replace(dataset, digests=tuple(digest for place, _, digest in found if place == own))
            for own, dataset in enumerate(datasets)
        ]
        with told(), progress.silent():
            # Of no rank, so that none looks for its random streams.
            manifest = manifest_of(
                state, written, step=step, world_size=0, table=table, meta=plan["meta"]
            )
            return str(folder.commit(state.parent, manifest))

    try:
        name, offsets = json.loads(team.by_root("begin the checkpoint", begin))
        state = Path(name) / on_disk.STATE_FILE
        pairs = zip(_datasets(plan), offsets, strict=True)
        datasets = [replace(dataset, offset=offset) for dataset, offset in pairs]
        source = _Source(weights, table, plan["meta"], not_finite)
        mine: list[tuple[int, int, str]] = []

        def steps() -> Iterator[None]:
            with told(), state.open("r+b", buffering=0) as file:
                for place, dataset in enumerate(datasets):
                    for index in dataset.slabs_of(team.rank, team.size):
                        slab = source.slab(dataset, index)
                        first = dataset.slab(index).start * dataset.itemsize
                        write_at(file.fileno(), dataset.offset + first, slab)
                        mine.append((place, index, on_disk.digest(slab)))
                        yield
                os.fsync(file.fileno())

        team.take_steps("write the checkpoint", steps())
        shares = team.all_gather_lists(mine)
        return Path(team.by_root("end the checkpoint", end))
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Source:
    """Elements of the datasets of a checkpoint, from weights of another program.

    Names of parameters with a value that is not finite are added to ``not_finite``.
    """

    def __init__(
        self,
        weights: Weights,
        table: on_disk.Table,
        meta: Mapping[str, Any],
        not_finite: list[str],
    ) -> None:
        self._weights, self._table, self._not_finite = weights, table, not_finite
        self._buffers = [name for name, _, _ in meta["buffers"]]
        self._states = weights.elements if isinstance(weights, Collected) else {}

    def slab(self, dataset: on_disk.Dataset, index: int) -> Array:
        """Elements of a slab. State that a parameter has not is zero. Raises CheckpointError."""
        wanted = dataset.slab(index)
        found = np.zeros(len(wanted), dtype=dataset.dtype)
        for begin, numel, read in self._parts(dataset.name):
            start, stop = max(wanted.start - begin, 0), min(wanted.stop - begin, numel)
            place = begin + start - wanted.start
            for piece in read(start, stop) if start < stop else ():
                found[place : place + len(piece)] = piece
                place += len(piece)
        return found

    def _parts(self, dataset: str) -> Iterator[tuple[int, int, Callable[..., Iterator[Array]]]]:
        """Place and number of elements of each part of a dataset, and what reads a range of it."""
        if dataset == on_disk.BUFFERS:
            begin = 0
            for name in self._buffers:
                held = self._weights[name]
                nbytes = held.numel * held.dtype.itemsize
                yield begin, nbytes, partial(_bytes, held)
                begin += nbytes
            return
        states: Mapping[str, HeldTensor] = self._states.get(dataset.removeprefix(on_disk.STATE), {})
        for row in self._table.owners:
            of_it = self._weights if dataset == on_disk.MASTER else states
            if row.name in of_it:
                yield row.offset, row.numel, partial(self._pieces, row.name, of_it[row.name])

    def _pieces(self, name: str, held: HeldTensor, start: int, stop: int) -> Iterator[Array]:
        for piece in held.pieces(start, stop):
            if name not in self._not_finite[-1:] and not bool(piece.isfinite().all()):
                self._not_finite.append(name)
            yield piece.numpy()


# --- what the weights are ------------------------------------------------------------------------------------------


def _told(weights: Weights, layout: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What ``extra`` gets of model, tokenizer, tied names and buffers, as far as the files state it."""
    if isinstance(weights, WeightFiles) and layout == "gpt2":
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


def _is_buffer(name: str, weights: Weights, patterns: Sequence[str]) -> bool:
    floating = weights[name].dtype.is_floating_point
    return not floating or any(fnmatchcase(name, pattern) for pattern in patterns)


def _table(
    weights: Weights, groups: Mapping[str, int], aliases: Mapping[str, str]
) -> on_disk.Table:
    """``groups``: of the optimizer, for each parameter; -1 where it has none."""
    lost = [(alias, name) for alias, name in aliases.items() if name not in groups]
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
    rows = [(name, weights[name].shape, group) for name, group in groups.items()]
    return on_disk.Table.build(rows, aliases)


def _check_gpt2(
    weights: Weights, table: on_disk.Table, aliases: Mapping[str, str], others: Sequence[str]
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
    path: Path,
    extra: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    buffers: Sequence[tuple[str, Any]],
) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "buffers": [[n, str(h.dtype).removeprefix("torch."), list(h.shape)] for n, h in buffers],
        "rng": [],
        "loss_scale": {"scaled": False, "scale": 1.0, "good_steps": 0},
        "skipped_steps": 0,
        "stage": 0,
        "precision": "fp32",
        "extra": dict(extra),
        "provenance": {"imported": str(path.resolve())} | on_disk.programs(),
    }


def _bytes(held: HeldTensor, start: int, stop: int) -> Iterator[Array]:
    yield held.whole().contiguous().reshape(-1).view(torch.uint8)[start:stop].numpy()
