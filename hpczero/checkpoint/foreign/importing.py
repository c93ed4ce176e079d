"""Weights of other programs into a zeroified model.

Every rank opens the files and reads only its own elements, so nothing is sent. The model is changed once all ranks have
read all of theirs. What rests on a tier is then read for a second time, and passes through memory in pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk.format import Table, plain_name, some
from hpczero.checkpoint.exchange import EvenRuns, check_range
from hpczero.checkpoint.foreign import weight_files
from hpczero.checkpoint.foreign.weight_files import HeldTensor, WeightFiles, cast
from hpczero.checkpoint.inventory import Inventory
from hpczero.checkpoint.states import KeptBuffer, buffers_of
from hpczero.errors import CheckpointMismatch
from hpczero.zero.buffers import persistent_buffers
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.away_shard import VALUES
from hpczero.zero.zeroify import sharding as sharding_of

logger = logging.getLogger("hpczero.checkpoint")


def import_weights(path: str | Path, model: nn.Module, *, layout: str = "hpczero") -> None:
    """Give ``model`` the parameters and buffers of another program. Collective over the topology's world.

    Args:
        path: a safetensors file, a ``state_dict`` that ``torch.save`` wrote, an index of several such files, or a
            folder that holds one of these. Any floating dtype is cast to the fp32 masters, that of frozen parameters to
            the precision of the model. All ranks must see it.
        model: zeroified, between two steps. The state of its optimizer stays as it is.
        layout: ``hpczero`` for the names and shapes of the model, ``gpt2`` for Hugging Face's GPT-2 into
            ``hpczero.models.GPT``.

    Raises:
        ConfigError: there are no weights at ``path``.
        CheckpointError: they cannot be read, or are damaged.
        CheckpointMismatch: the weights are of another model, hold values that its dtypes cannot, or differ between
            ranks. The message lists the differences. The model is as it was.
        TierError: values cannot be brought to a tier. Nobody may use the model before the next load.
    """
    state = sharding_of(model)
    topology = state.topology
    state.step.finish_updates()
    inventory, kept = Inventory.create(state), buffers_of(state)
    with topology.agreed("compare the weights with the model"):
        weights = WeightFiles(Path(path), layout=layout)
        if layout == "gpt2":
            _match_config(weights, model)
        _match(weights, inventory.table, kept)
        mine = weights.fingerprint()
    # Of one path: nodes may have folders of their own there.
    unlike = CheckpointMismatch(f"{path}: other weights; bring the same ones to every node")
    topology.same(mine, "compare the weights with those of rank 0", unlike)
    with topology.agreed("read the weights"):
        weights.check(topology.rank, topology.size)
        # What rests on a tier is larger than memory: it is read once more when everything is known to be good.
        numel = inventory.needed.numel
        values = (
            torch.empty(numel, dtype=torch.float32, device="cpu")
            if state.away.store is None
            else None
        )
        broken = _look(weights, inventory, values)
        buffers = []
        for name, buffer in persistent_buffers(model).items():
            names = next(other.names for other in kept if plain_name(name) in other.names)
            held = _first(weights, names)
            buffers.append((buffer, cast(held.whole(), buffer.dtype, held.label).clone()))
    found = topology.gather(float(bool(broken)))
    if broken and not any(found[: topology.rank]):  # once
        logger.warning(
            "%s: has infinite or NaN values in %s (as rank %d has read it); training from them fails: compare the "
            "file with that of its source",
            path,
            some(broken),
            topology.rank,
        )
    if values is None:
        _stream(weights, inventory, state)
    else:
        inventory.set_values(values)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    topology.barrier()


# --- comparison ----------------------------------------------------------------------------------------------------


def _names(table: Table) -> dict[str, list[str]]:
    found = {row.name: [row.name] for row in table.owners}
    for row in table.rows:
        if row.tied_to is not None:
            found[table.rows[row.tied_to].name].append(row.name)
    return found


def _first(weights: WeightFiles, names: Sequence[str]) -> HeldTensor:
    return next(weights[name] for name in names if name in weights)


def _match(weights: WeightFiles, table: Table, buffers: Sequence[KeptBuffer]) -> None:
    wanted: list[Sequence[str]] = [*_names(table).values(), *(kept.names for kept in buffers)]
    shapes = {row.name: row.shape for row in table.rows}
    shapes |= {name: kept.shape for kept in buffers for name in kept.names}
    differences = []
    missing = [names[0] for names in wanted if not any(name in weights for name in names)]
    if missing:
        differences.append(f"they have no {some(missing)}")
    foreign = [name for name in weights if name not in shapes]
    if foreign:
        differences.append(f"the model has no {some(foreign)}")
    others = [
        f"{name} is {weights[name].shape} in the file and {shape} in the model"
        for name, shape in shapes.items()
        if name in weights and weights[name].shape != shape
    ]
    others += [
        f"{row.name} is {weights[row.name].dtype} in the file, expected floating point"
        for row in table.rows
        if row.name in weights and not weights[row.name].dtype.is_floating_point
    ]
    if others:
        differences.append(some(others, "; "))
    if differences:
        raise CheckpointMismatch(
            f"{weights.path}: weights of another model: {'; '.join(differences)}. Build the model they belong to"
            + (", or give layout='gpt2'" if gpt2.looks_like(weights) else "")
        )


def _match_config(weights: WeightFiles, model: nn.Module) -> None:
    """Refuse a config.json whose model differs in what shapes do not tell: it would compute other logits."""
    heads = getattr(getattr(model, "config", None), "heads", None)
    known = weights.model.get("heads", heads)
    if heads is not None and heads != known:
        raise CheckpointMismatch(
            f"{weights.path}: weights of another model: {known} attention heads, and the model has {heads}. "
            "Build the model they belong to"
        )


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RankPiece:
    """Some elements of one parameter that this rank holds.

    ``window`` is where they are in the inventory's table, ``place`` where in the order of ``inventory.needed``.
    """

    name: str
    window: range
    place: slice
    values: Tensor


def _pieces(weights: WeightFiles, inventory: Inventory) -> Iterator[_RankPiece]:
    """All elements of ``inventory.needed``, in that order. Runs with gaps are read with what lies between them."""
    names = _names(inventory.table)
    begin = 0
    for row, entry in zip(inventory.rows, inventory.needed.entries, strict=True):
        name, start, stop = row.name, entry.start - row.offset, entry.stop - row.offset
        present = [other for other in names[name] if other in weights]
        others = [
            other
            for other in present[1:]
            if not weight_files.is_same_memory(weights, present[0], other)
        ]
        for values in weights[present[0]].pieces(start, stop):
            for other in others:
                if not _is_equal(weights[other], start, values):
                    raise CheckpointMismatch(
                        f"{weights.path}: {present[0]} and {other} are tied in the model and differ in the file; build "
                        "the model with both, or take one out of the file"
                    )
            window = range(row.offset + start, row.offset + start + len(values))
            own = EvenRuns.of([entry.clipped(window)])
            picked = values
            if own.numel < len(values):
                picked = torch.empty(own.numel, dtype=torch.float32, device="cpu")
                own.gather(values.numpy(), window.start, picked.numpy())
            yield _RankPiece(name, window, slice(begin, begin + own.numel), picked)
            start, begin = start + len(values), begin + own.numel


def _look(weights: WeightFiles, inventory: Inventory, keep: Tensor | None) -> list[str]:
    """Read everything, into ``keep`` if given. Returns names of parameters with elements that are not finite."""
    found: dict[str, None] = {}
    for piece in _pieces(weights, inventory):
        if inventory.half is not None:
            start, stop = piece.window.start, piece.window.stop
            check_range(
                piece.values, inventory.half, inventory.table, start, weights.path, stop=stop
            )
        if not bool(piece.values.isfinite().all()):
            found[piece.name] = None
        if keep is not None:
            keep[piece.place] = piece.values
    return list(found)


def _stream(weights: WeightFiles, inventory: Inventory, sharding: Sharding) -> None:
    """Bring the elements to where they rest, a piece at a time. Collective over world."""
    inventory.end_step()
    shards = [unit.away for unit in sharding.units if unit.away is not None]
    try:
        with sharding.topology.agreed("put the weights where they rest"):
            # Whatever went wrong with what was there does not matter any more.
            for shard in shards:
                if VALUES in shard.parts:
                    shard.drop([VALUES])
            held = inventory.sink(None, range(len(inventory.needed)))
            for piece in _pieces(weights, inventory):
                held[piece.place] = piece.values
            for shard in shards:
                if VALUES in shard.parts:
                    shard.settle(VALUES)
        for unit in sharding.units:
            unit.publish()
    except BaseException:
        for unit in sharding.units:  # nobody goes on with a mixture
            unit.whole.doubt()
        raise


def _is_equal(held: HeldTensor, start: int, values: Tensor) -> bool:
    begin = 0
    for piece in held.pieces(start, start + len(values)):
        if not weight_files.are_equal(piece, values[begin : begin + len(piece)]):
            return False
        begin += len(piece)
    return True
