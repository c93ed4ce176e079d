"""Whether a checkpoint is of this model and its optimizers, and how they differ.

Owns: what must be equal, and the message that lists the differences. Must not know: files, ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpczero.adapters import gpt2
from hpczero.checkpoint import states
from hpczero.checkpoint.disk.format import NAMED, SEVERAL, Manifest, Row, Table
from hpczero.checkpoint.inventory import names_in
from hpczero.checkpoint.states import Kept, fits, named_buffers
from hpczero.errors import CheckpointMismatch
from hpczero.files.regular import shown
from hpczero.zero.sharding import Sharding
from hpczero.zero.update.optimizers import OptimizerSet


def match_parameters(manifest: Manifest, table: Table, path: Path) -> dict[str, int]:
    """Place in the checkpoint of each parameter of the model.

    Raises:
        CheckpointMismatch: the parameters differ; the message lists how.
    """
    theirs, ours = manifest.table.named(), table.named()
    differences = []
    missing = [name for name in ours if name not in theirs]
    extra = [name for name in theirs if name not in ours]
    alone = "base" in manifest.meta
    if missing:
        of_it = ", which trains here (it holds what was trained alone)" if alone else ""
        differences.append(f"the checkpoint has no {_some(missing)}{of_it}")
    if extra:
        differences.append(f"the model has no {_some(extra)}")
    shapes = [
        f"{name} is {theirs[name].shape} in the checkpoint and {row.shape} in the model"
        for name, row in ours.items()
        if name in theirs and theirs[name].shape != row.shape
    ]
    if shapes:
        differences.append("; ".join(shapes[:NAMED]) + _more(shapes))
    frozen = [
        name
        for name, row in ours.items()
        if name in theirs and theirs[name].frozen and not row.frozen
    ]
    if frozen and manifest.meta["optimizer"] is not None:
        differences.append(f"frozen in the checkpoint and trained here: {_some(frozen)}")
    if not differences:
        differences = _ties(table, manifest.table)[:NAMED]
    if differences:
        raise CheckpointMismatch(
            f"{path}: belongs to another model: {'; '.join(differences)}. {_way_out(theirs, ours)}, or start anew with "
            "another name (--run.name of the training command, another folder elsewhere). Of its weights those that "
            f"fit can be loaded before zeroify: {_export(path)}, then model.load_state_dict(fitting, strict=False)"
        )
    return {name: theirs[name].offset for name in ours}


def _way_out(theirs: Mapping[str, Row], ours: Mapping[str, Row]) -> str:
    known = [name for name in ours if name in theirs]
    unlike = [name for name in known if theirs[name].shape != ours[name].shape]
    vocabulary = [
        name
        for name in unlike
        if name in (gpt2.TABLE, gpt2.HEAD) and theirs[name].shape[1:] == ours[name].shape[1:]
    ]
    if unlike and unlike == vocabulary and theirs.keys() == ours.keys():
        shape = theirs[unlike[0]].shape
        return (
            f"Its vocabulary has {shape[0]:,} ids, and that of a run is its tokens': with hpczero.train give "
            "--data.path the token file it was trained on, or its text with the same --data.tokenizer; otherwise build "
            "the model it was saved from"
        )
    return "Build the model it was saved from"


def _ties(ours: Table, theirs: Table) -> list[str]:
    """Parameters that are one in one of two tables, and two in the other."""
    found = []
    for table, other, where, elsewhere in (
        (ours, theirs, "here", "in the checkpoint"),
        (theirs, ours, "in the checkpoint", "here"),
    ):
        owners = _owners(other)
        for row in table.rows:
            if row.tied_to is not None:
                name = table.rows[row.tied_to].name
                if owners[row.name] != owners[name]:
                    found.append(f"{row.name} is tied to {name} {where} and not {elsewhere}")
    return found


def _owners(table: Table) -> dict[str, str]:
    return {
        row.name: table.rows[row.tied_to].name if row.tied_to is not None else row.name
        for row in table.rows
    }


def match_optimizer(
    manifest: Manifest, sharding: Sharding, table: Table, path: Path
) -> dict[str, str]:
    """Kinds of the optimizer's state; none if either side has no optimizer.

    Raises:
        CheckpointMismatch: the optimizers are others, or have other groups.
    """
    saved, optimizers = manifest.meta["optimizer"], sharding.optimizers
    if not len(optimizers) or saved is None:
        return {}
    _match_classes(saved, optimizers, path)
    _match_groups(manifest, table, path)
    for place, (group, options) in enumerate(zip(optimizers.groups, saved["groups"], strict=True)):
        for name, value in options.items():
            if not fits(value, group.get(name)):
                raise CheckpointMismatch(
                    f"{path}: {name} of group {place} is {shown(value)} in the checkpoint and {shown(group[name])} in "
                    "the optimizer; use the one it was saved from"
                )
    for name in names_in(saved["kinds"]):
        if name not in sharding.averages:
            raise CheckpointMismatch(
                f"{path}: holds the average {name!r} of the weights, and the model has "
                f"{sorted(sharding.averages) or 'none'}; make it before the load: hpczero.optim.EMA(model, "
                f"name={name!r}), or SWA"
            )
    return dict(saved["kinds"])


def _match_classes(saved: Mapping[str, Any], optimizers: OptimizerSet, path: Path) -> None:
    """Refuse another number of optimizers, other classes, and other numbers of groups."""
    theirs = saved.get(SEVERAL, [[saved["class"], len(saved["groups"])]])
    mine = [[type(each).__name__, len(each.param_groups)] for each in optimizers]
    if len(theirs) == len(mine) == 1 and theirs[0][0] != mine[0][0]:
        raise CheckpointMismatch(
            f"{path}: holds the state of {theirs[0][0]}, and the optimizer is {mine[0][0]}; use the one it was saved "
            f"from, or its weights alone: {_import(path)}"
        )
    if [name for name, _ in theirs] != [name for name, _ in mine]:
        raise CheckpointMismatch(
            f"{path}: holds the state of {_counted(theirs)}, and the model was zeroified with {_counted(mine)}; use "
            f"those it was saved from, in the same order, or its weights alone: {_import(path)}"
        )
    for place, ((_, count), (_, here)) in enumerate(zip(theirs, mine, strict=True)):
        if count != here:
            raise CheckpointMismatch(
                f"{path}: has {count} groups of parameters, and {optimizers.name(place)} {here}; make the same groups, "
                f"or take its weights alone: {_import(path)}"
            )


def _export(path: Path) -> str:
    return f"python -m hpczero.checkpoint export {shlex.quote(str(path))} weights.safetensors"


def _import(path: Path) -> str:
    return f"{_export(path)}, then hpczero.checkpoint.import_weights('weights.safetensors', model)"


def _counted(optimizers: Sequence[Sequence[Any]]) -> str:
    names = ", ".join(name for name, _ in optimizers)
    return f"{len(optimizers)} optimizer(s) ({names})"


def _match_groups(manifest: Manifest, table: Table, path: Path) -> None:
    """Refuse parameters whose groups have other places: they would get each other's options."""
    theirs = manifest.table.named()
    for own in table.owners:
        row = theirs[own.name]
        if not own.frozen and row.group != own.group:
            raise CheckpointMismatch(
                f"{path}: {own.name} is in group {row.group} of the optimizer in the checkpoint and in group "
                f"{own.group} here, so it would get the options of other parameters; make the same groups in the same "
                "order"
            )


def match_streams(manifest: Manifest, path: Path) -> None:
    """Refuse random streams of another form, unless they are of ranks that this job does not have.

    Raises:
        CheckpointMismatch: the message names the first.
    """
    mine = {name: len(state) for name, state in states.capture().items()}
    for name, nbytes in manifest.meta["rng"]:
        if manifest.world_size and mine.get(name, nbytes) != nbytes:
            raise CheckpointMismatch(
                f"{path}: the random stream of {name} has {nbytes} bytes in the checkpoint and {mine[name]} here; "
                "use the versions it was saved with"
            )


def match_buffers(manifest: Manifest, sharding: Sharding, kept: Sequence[Kept], path: Path) -> None:
    """Refuse other buffers.

    Args:
        manifest: of the checkpoint.
        sharding: of the model.
        kept: persistent buffers of all stages.
        path: of the checkpoint.

    Raises:
        CheckpointMismatch: the message names the first.
    """
    named = named_buffers(sharding.model)
    persistent = {id(buffer) for buffer in sharding.buffers}
    saved = {name for name, _, _ in manifest.meta["buffers"]}
    elsewhere = {buffer.name for buffer in kept} - set(named)
    for name, dtype, shape in manifest.meta["buffers"]:
        if name in elsewhere:  # the ranks of that stage compare it
            continue
        buffer = named.get(name)
        got = (
            None
            if buffer is None
            else f"{buffer.dtype} {tuple(buffer.shape)}".removeprefix("torch.")
        )
        expected = f"{dtype} {tuple(shape)}"
        if got != expected:
            raise CheckpointMismatch(
                f"{path}: buffer {name!r} is {expected} in the checkpoint and {got or 'not'} in the model"
            )
    more = [
        name for name, buffer in named.items() if id(buffer) in persistent and name not in saved
    ]
    if more:
        raise CheckpointMismatch(
            f"{path}: the checkpoint has no buffer {_some(more)}; build the model it was saved from"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + _more(names)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - NAMED} more" if len(names) > NAMED else ""


def renamed(ours: Table, theirs: Table) -> dict[str, str]:
    """Name in this model of a tied parameter that is stored under another of its names."""
    own = {row.name for row in ours.owners}
    named = ours.named()
    found = {}
    for row in theirs.owners:
        if row.name not in own and row.name in named:
            tied_to = named[row.name].tied_to
            if tied_to is not None:
                found[row.name] = ours.rows[tied_to].name
    return found
