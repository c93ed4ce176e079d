"""Reading a checkpoint into a model, at any number of ranks, stage and units.

Each rank reads the slabs it is responsible for, checks them, and sends elements to the ranks that need them. The model
is not changed before everything has been read and checked.
"""

from __future__ import annotations

import json
import logging
import operator
import shlex
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpczero.adapters import gpt2
from hpczero.checkpoint import states
from hpczero.checkpoint.disk import folder
from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.disk.lines import homes
from hpczero.checkpoint.disk.stored import check_content
from hpczero.checkpoint.elements import SlabReader, Streamed, WholeElements
from hpczero.checkpoint.exchange import EvenRuns
from hpczero.checkpoint.inventory import Inventory, names_in
from hpczero.checkpoint.snapshot import Base, expand
from hpczero.checkpoint.writing import wait_for_left
from hpczero.errors import CheckpointMismatch, ConfigError, CorruptCheckpoint, StepError, TierError
from hpczero.files.regular import shown
from hpczero.job.topology import Topology
from hpczero.zero.buffers import set_bytes
from hpczero.zero.sharding import Sharding
from hpczero.zero.update.optimizers import OptimizerSet
from hpczero.zero.zeroify import sharding as sharding_of


def match_parameters(
    manifest: on_disk.Manifest, table: on_disk.Table, path: Path
) -> dict[str, int]:
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
        differences.append(f"the checkpoint has no {on_disk.some(missing)}{of_it}")
    if extra:
        differences.append(f"the model has no {on_disk.some(extra)}")
    shapes = [
        f"{name} is {theirs[name].shape} in the checkpoint and {row.shape} in the model"
        for name, row in ours.items()
        if name in theirs and theirs[name].shape != row.shape
    ]
    if shapes:
        differences.append(on_disk.some(shapes, "; "))
    frozen = [
        name
        for name, row in ours.items()
        if name in theirs and theirs[name].frozen and not row.frozen
    ]
    if frozen and manifest.meta["optimizer"] is not None:
        differences.append(f"frozen in the checkpoint and trained here: {on_disk.some(frozen)}")
    if not differences:
        differences = _ties(table, manifest.table)[: on_disk.NAMED]
    if differences:
        raise CheckpointMismatch(
            f"{path}: belongs to another model: {'; '.join(differences)}. {_way_out(theirs, ours)}, or start anew with "
            "another name (--run.name of the training command, another folder elsewhere). Of its weights those that "
            f"fit can be loaded before zeroify: {_export(path)}, then model.load_state_dict(fitting, strict=False)"
        )
    return {name: theirs[name].offset for name in ours}


def _way_out(theirs: Mapping[str, on_disk.Row], ours: Mapping[str, on_disk.Row]) -> str:
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


def _ties(ours: on_disk.Table, theirs: on_disk.Table) -> list[str]:
    """Parameters that are one in one of two tables, and two in the other."""
    found = []
    for table, other, where, elsewhere in (
        (ours, theirs, "here", "in the checkpoint"),
        (theirs, ours, "in the checkpoint", "here"),
    ):
        owners = {
            row.name: other.rows[row.tied_to].name if row.tied_to is not None else row.name
            for row in other.rows
        }
        for row in table.rows:
            if row.tied_to is not None:
                name = table.rows[row.tied_to].name
                if owners[row.name] != owners[name]:
                    found.append(f"{row.name} is tied to {name} {where} and not {elsewhere}")
    return found


def match_optimizer(
    manifest: on_disk.Manifest, sharding: Sharding, table: on_disk.Table, path: Path
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
            if not states.fits(value, group.get(name)):
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
    theirs = saved.get(on_disk.SEVERAL, [[saved["class"], len(saved["groups"])]])
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


def _match_groups(manifest: on_disk.Manifest, table: on_disk.Table, path: Path) -> None:
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


def match_streams(manifest: on_disk.Manifest, path: Path) -> None:
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


def match_buffers(
    manifest: on_disk.Manifest, sharding: Sharding, kept: Sequence[states.KeptBuffer], path: Path
) -> None:
    """Refuse other buffers; ``kept`` are the persistent buffers of all stages.

    Raises:
        CheckpointMismatch: the message names the first.
    """
    named = states.named_buffers(sharding.model)
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
            f"{path}: the checkpoint has no buffer {on_disk.some(more)}; build the model it was saved from"
        )


def renamed(ours: on_disk.Table, theirs: on_disk.Table) -> dict[str, str]:
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


logger = logging.getLogger("hpczero.checkpoint")


@dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint beside the model.

    Attributes:
        path: folder of the checkpoint.
        step: optimizer steps done.
        extra: what was given to ``save``.
        world_size: ranks that saved it.
        imported: whether it was made of another program's weights, so no training came before it.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    world_size: int
    imported: bool = False


def find(path: Path, topology: Topology, *, own: bool) -> tuple[list[Path], bool]:
    """Checkpoints that ``path`` may mean, best first, and whether ``path`` is one itself. Collective over world.

    Args:
        path: of a checkpoint, a folder of checkpoints or, unless ``own``, a run.
        topology: its rank 0 looks.
        own: whether ``path`` is the folder that this program saves to, and nothing else.
    """
    text = ""
    with topology.agreed("look for checkpoints"):
        if topology.is_root:
            is_one = folder.is_checkpoint(path)
            place = path if own or is_one else folder.folder_at(path)
            candidates = [path] if is_one else folder.Folder(place).candidates()
            text = json.dumps([is_one, list(map(str, candidates))])  # a path may hold any character
    is_one, names = json.loads(topology.broadcast_text(text))
    return [Path(name) for name in names], is_one


def load_newest_at(path: Path, sharding: Sharding, *, own: bool = False) -> Loaded | None:
    """Load ``path``, or the newest sound checkpoint in it; None if there is none at all. Collective over world.

    Args:
        path: as in ``find``.
        sharding: of the model.
        own: as in ``find``.

    Raises:
        CorruptCheckpoint: there are checkpoints, and none is sound; or ``path`` itself is one that is not.
        CheckpointMismatch: it does not belong to this model, or a later version wrote it.
        StepError: inside ``gathered``, where loaded values would not stay.
    """
    with sharding.topology.agreed("begin a load"):
        if any(unit.whole.holds for unit in sharding.units):
            raise StepError(
                f"rank {sharding.topology.rank}: a load inside `with hpczero.gathered(model):` would be overwritten at "
                "its end by the values gathered before; load outside of the block"
            )
    sharding.unfreezing.settle()
    wait_for_left()  # it may be what is asked for
    with sharding.topology.watchdog.operation("a load of a checkpoint"):
        return _newest(path, sharding, own=own)


def _newest(path: Path, sharding: Sharding, *, own: bool) -> Loaded | None:
    topology = sharding.topology
    candidates, is_one = find(path, topology, own=own)
    failed: list[str] = []
    for candidate in candidates:
        try:
            found = load_one(candidate, sharding, asked_for=is_one)
        except CorruptCheckpoint as error:
            if topology.is_root:
                logger.warning("%s", error)
            failed.append(str(error))
            continue
        if failed and topology.is_root:
            logger.warning("going on from the older %s", found.path)
        return found
    if failed:
        if is_one:
            others = "no other was looked at, because this one was asked for"
        elif failed[1:]:
            others = f"{len(failed) - 1} older ones are not sound either"
        else:
            others = "no older one is there"
        raise CorruptCheckpoint(
            f"{failed[0]}; {others}. Restore one from a copy, or start anew with another name (--run.name of "
            "the training command, another folder elsewhere)"
        ).on_all_ranks()
    return None


def load_one(path: Path, sharding: Sharding, *, asked_for: bool) -> Loaded:
    """Load this checkpoint and no other. Collective over world.

    Args:
        path: of the checkpoint.
        sharding: of the model.
        asked_for: whether it was asked for by its path. It need then not be of the step that its name states.

    Raises:
        CorruptCheckpoint: the message names dataset, parameters and range, or a step other than the name's. The model
            is as it was, unless it rests on a tier and the file went bad between its two readings: then nobody may use
            it before the next load.
        CheckpointMismatch: the message lists the differences. The model is as it was.
        TierError: values or state cannot be brought to the tier. Nobody may use the model before the next load.
    """
    topology = sharding.topology
    manifest = _manifest(path, topology, asked_for=asked_for)
    with topology.agreed("look at the manifest"):
        check_content(manifest, path)
        extra = states.loaded_extra(manifest.meta, path)
        manifest = manifest.plain()
    base = Base.read(manifest.meta, path)  # the same manifest on every rank
    inventory = Inventory.create(sharding, only_trained=base is not None)
    buffers_here = states.buffers_of(sharding)
    with topology.agreed("compare the checkpoint with the model"):
        places = match_parameters(manifest, inventory.table, path)
        keys = match_optimizer(manifest, sharding, inventory.table, path)
        match_buffers(manifest, sharding, buffers_here, path)
        match_streams(manifest, path)
        extra_states = states.loaded_states(manifest.meta, sharding.model, topology, path)
    if base is not None:
        _check_base(base, sharding, path)
    reader = SlabReader(path, manifest, topology)
    trainable = _moved(inventory.needed_trainable, inventory.rows, places)
    wanted = {on_disk.MASTER: _moved(inventory.needed, inventory.rows, places)}
    wanted |= {on_disk.STATE + key: trainable for key, kind in keys.items() if kind == "elements"}
    way = WholeElements if sharding.away.store is None else Streamed  # larger than memory
    elements = way(reader, wanted, inventory)
    elements.read()
    buffers, rng = reader.read_whole(on_disk.BUFFERS), reader.read_whole(on_disk.RNG)
    elements.check()
    with suppress(StepError, TierError):  # on all ranks; what is loaded takes its place
        sharding.step.finish_updates()
    try:
        elements.give_values()
        if len(sharding.optimizers) and manifest.meta["optimizer"] is not None:
            _set_optimizer(sharding, manifest, inventory, elements, keys)
        elif len(sharding.optimizers):
            sharding.advice.about_fresh_state(path)
    except BaseException:
        for unit in sharding.units:  # nobody goes on with a mixture
            unit.whole.doubt()
        raise
    _set_buffers(sharding, manifest, buffers)
    with topology.agreed("give modules their extra states"):
        for module, state in extra_states:
            module.set_extra_state(state)
    _set_streams(topology, manifest, rng)
    sharding.scaler.restore(manifest.meta["loss_scale"])
    sharding.step.skips.skipped = int(manifest.meta["skipped_steps"])
    if sharding.precision.sends_codes:
        sharding.collectives.calls.step = manifest.meta.get("optimizer_steps", manifest.step)
    sharding.lineage = dict.fromkeys(homes(path), manifest.step)
    topology.barrier()
    return Loaded(path, manifest.step, extra, manifest.world_size, folder.is_imported(manifest))


def _manifest(path: Path, topology: Topology, *, asked_for: bool) -> on_disk.Manifest:
    text = ""
    with topology.agreed("read the manifest"):
        if topology.is_root:
            manifest = folder.read_manifest(path)
            wrong = folder.misnamed(path, manifest)
            if wrong and not asked_for:
                raise CorruptCheckpoint(wrong)
            if wrong:
                logger.warning("%s; loaded all the same, because it was asked for", wrong)
            text = manifest.to_json()
    return on_disk.Manifest.from_json(topology.broadcast_text(text))


def _check_base(base: Base, sharding: Sharding, path: Path) -> None:
    found = Base.of(sharding)
    with sharding.topology.agreed("compare the base with the model's"):
        compared = base.check(found, path)
    if not compared and sharding.topology.is_root:
        logger.warning(
            "%s: its base was held as %s and this one as %s, so nobody can tell whether the frozen values are the same",
            path,
            base.held,
            found.held,
        )


# --- reading -------------------------------------------------------------------------------------------------------


def _moved(runs: EvenRuns, rows: Sequence[on_disk.Row], places: Mapping[str, int]) -> EvenRuns:
    """The same elements by their places in the checkpoint; ``runs`` has an entry for each of the first ``rows``."""
    return runs.moved([places[row.name] - row.offset for row in rows[: len(runs)]])


def _set_optimizer(
    sharding: Sharding,
    manifest: on_disk.Manifest,
    inventory: Inventory,
    elements: WholeElements,
    keys: Mapping[str, str],
) -> None:
    names = [row.name for row in manifest.table.owners if not row.frozen]
    mine = renamed(inventory.table, manifest.table)
    present = {
        key: {mine.get(name, name): v for name, v in expand(values, names).items()}
        for key, values in manifest.meta["optimizer"]["present"].items()
    }
    inventory.set_optimizer(lambda key: elements.give_state(key, present[key]), keys, present)
    _set_options(sharding, manifest.meta["optimizer"]["groups"])


# --- what is not sharded -------------------------------------------------------------------------------------------


def _set_options(sharding: Sharding, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(sharding.optimizers.groups, groups, strict=True):
        for name, value in saved.items():
            current = group.get(name)
            if name == "param_names":  # of another rank, in a checkpoint of an older version
                continue
            if isinstance(current, Tensor):
                with torch.no_grad():
                    current.fill_(value)
            else:
                group[name] = states.restored(value, current)


def _set_buffers(sharding: Sharding, manifest: on_disk.Manifest, data: Tensor) -> None:
    named = states.named_buffers(sharding.model)
    begin = 0
    with torch.no_grad():
        for name, dtype, shape in manifest.meta["buffers"]:
            nbytes = int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
            if name in named:  # else it is another stage's
                set_bytes(named[name], data[begin : begin + nbytes])
            begin += nbytes


def _set_streams(topology: Topology, manifest: on_disk.Manifest, data: Tensor) -> None:
    sizes = {name: int(size) for name, size in manifest.meta["rng"]}
    row = sum(sizes.values())
    # Tensor ranks go on with one stream, whoever had it when the checkpoint was saved: their masks must be equal.
    rank = topology.rank - topology.tensor.rank
    if not manifest.world_size:
        return  # made of another program's weights: the caller's streams are the caller's
    # So were theirs when it was saved: one of them goes on with it now, the others would draw the same.
    if rank >= manifest.world_size or rank % int(manifest.meta.get("tensor", 1)):
        states.start_anew(zlib.crc32(data[:row].numpy().tobytes()) + rank)
        return
    found, begin = {}, rank * row
    for name, size in sizes.items():
        found[name] = data[begin : begin + size].numpy().copy()
        begin += size
    states.restore(found)


Given = Optimizer | Sequence[Optimizer] | None


def load(directory: str | Path, model: nn.Module, optimizer: Given = None) -> Loaded:
    """Make ``model`` and its optimizer what they were at a save. Collective over the topology's world.

    The number of ranks, the stage, the units and the precision may be others than at the save. Parameters, state and
    options of the optimizer, buffers, extra states of modules, random streams and loss scale are restored. A scheduler
    and a loader are not; restore them from ``extra``.

    Args:
        directory: a checkpoint, or the folder of checkpoints or of a run, of which the newest sound one is loaded.
        model: zeroified, of the same parameters.
        optimizer: the one it was zeroified with, or a tuple or list of them; None takes those too.

    Returns:
        What the checkpoint holds beside the model, ``extra`` among it.

    Raises:
        ConfigError: there is no checkpoint.
        StepError: inside ``gathered``, whose end would write the old values over the loaded ones.
        CorruptCheckpoint: none is sound; the message says what is wrong with the newest.
        CheckpointMismatch: it is of another model or optimizer, or of a later version; the message lists the
            differences.
    """
    state = given_sharding(model, optimizer)
    found = load_newest_at(folder.given_path(directory), state)
    if found is None:
        raise ConfigError(f"{directory}: no checkpoint there; {folder.GIVE}").on_all_ranks()
    return found


def given_sharding(model: nn.Module, optimizer: Given) -> Sharding:
    """The sharding of a model, once its optimizers are those that were given. Not collective.

    Raises:
        ConfigError: they are others.
    """
    state = sharding_of(model)
    if optimizer is None:
        return state
    given = optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,)
    own = list(state.optimizers)
    if len(given) == len(own) and all(map(operator.is_, given, own)):
        return state
    if len(own) < 2:
        raise ConfigError(
            "the optimizer is not the one this model was zeroified with; give that one, or leave it out"
        )
    raise ConfigError(
        f"got {len(given)} optimizer(s), which are not the {len(own)} that this model was zeroified with "
        f"({', '.join(state.optimizers.classes)}, in this order); give those, or leave them out"
    )
