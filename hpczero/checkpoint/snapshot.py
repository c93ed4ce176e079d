"""What is to be written, as it was at one step: the parts of a checkpoint, and what its manifest says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.checkpoint import states
from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.exchange import EvenRuns
from hpczero.checkpoint.held import HeldElements, HeldPieces, ParameterPiece, ValuesHome
from hpczero.checkpoint.inventory import Inventory
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from hpczero.files.regular import shown
from hpczero.options.environment import Environment
from hpczero.zero.buffers import bytes_of
from hpczero.zero.sharding import Sharding

# Base: the frozen parameters that a checkpoint of the trained ones alone belongs to.
#
# The number is a sum over elements of their bits times an odd number of their place, modulo 2**64. It does not depend
# on the number of ranks, the stage or the units. Values of fp32 and of bf16 count as bf16, so that a base that was
# rounded for training is the same base.

META = "base"  # the field of a manifest
CHUNK_NUMEL = 2**20
_SEEN_AS = {"fp32": "bf16", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Base:
    """The frozen parameters of one model.

    Attributes:
        held: as which numbers they were looked at; bases with another word cannot be compared.
        sums: of each frozen parameter, by its name in the whole model; 16 hexadecimal digits.
    """

    held: str
    sums: Mapping[str, str]

    @classmethod
    def of(cls, sharding: Sharding) -> Base:
        """Look at the frozen values of a model. Collective over world.

        Raises:
            CheckpointError, TierError: on every rank; parts do not make one model, or a tier cannot be read.
        """
        topology, inventory = sharding.topology, Inventory.create(sharding)
        seen = _SEEN_AS[sharding.precision.param]
        codecs = {unit.spec.codec.name for unit in sharding.units if unit.spec.codec is not None}
        held = ", ".join([seen, *sorted(codecs)])
        frozen = [row for row in inventory.table.owners if row.frozen]
        place = {row.name: index for index, row in enumerate(frozen)}
        sums = np.zeros(len(frozen), dtype=np.uint64)
        with topology.agreed("look at the frozen values"), np.errstate(over="ignore"):
            for row, piece in inventory.frozen_pieces():
                for elements, values in _chunks(piece):
                    first = elements - row.offset
                    sums[place[row.name]] += _sum(values.to(_DTYPES[seen]), first)
        with topology.watchdog.collective(
            "checkpoint: which base the trained parameters belong to"
        ):
            topology.world.comm.Allreduce(MPI.IN_PLACE, sums, op=MPI.SUM)
        names = [row.name for row in frozen]
        return cls(held, {n: f"{s:016x}" for n, s in zip(names, sums.tolist(), strict=True)})

    @classmethod
    def read(cls, meta: Mapping[str, Any], path: Path) -> Base | None:
        """What a manifest says; None of a checkpoint of all parameters.

        Raises:
            CorruptCheckpoint: it does not say it in this form.
        """
        said = meta.get(META)
        if said is None:
            return None
        if (
            not isinstance(said, dict)
            or not isinstance(said.get("held"), str)
            or not isinstance(said.get("sums"), dict)
            or not all(isinstance(value, str) for value in said["sums"].values())
        ):
            raise CorruptCheckpoint(
                f"{path}: manifest.json cannot be: meta.{META} is no object with held and sums"
            )
        return cls(said["held"], said["sums"])

    def to_json(self) -> dict[str, Any]:
        """As ``read`` reads it."""
        return {"held": self.held, "sums": dict(self.sums)}

    def check(self, found: Base, path: Path) -> bool:
        """Refuse another base than this one, of the checkpoint ``path``. Returns whether the two could be compared.

        Raises:
            CheckpointMismatch: the message names the first parameters that differ.
        """
        if self.sums.keys() != found.sums.keys():
            odd = sorted(self.sums.keys() ^ found.sums.keys())
            raise CheckpointMismatch(
                f"{path}: holds trained parameters alone, of a model in which other parameters were frozen: "
                f"{on_disk.some(odd)}; train the same parameters, or load a checkpoint of all parameters"
            )
        if self.held != found.held:
            return False
        odd = [name for name, value in self.sums.items() if found.sums[name] != value]
        if odd:
            raise CheckpointMismatch(
                f"{path}: holds trained parameters alone, and they belong to another base: {len(odd)} of "
                f"{len(self.sums)} frozen parameters have other values here ({on_disk.some(odd)}); load the base model "
                "first that it was trained on"
            )
        return True


def _chunks(piece: ParameterPiece) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Tensor]]:
    """Places in the file, (n,) int64, and fp32 values (n,), of some elements after the other."""
    held = HeldPieces([piece], ValuesHome())
    entry = piece.in_file
    skipped = entry.at(0) - entry.base
    before = skipped // entry.stride * entry.length + skipped % entry.stride
    for begin in range(0, piece.numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, piece.numel)
        runs, rest = np.divmod(np.arange(begin + before, end + before), entry.length)
        yield entry.base + runs * entry.stride + rest, held[begin:end]


def _sum(values: Tensor, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.uint64:
    """Of 16-bit values and their places in the parameter; modulo 2**64."""
    bits = values.contiguous().view(torch.int16).numpy().astype(np.uint64)
    weights = places.astype(np.uint64) * np.uint64(2) + np.uint64(1)
    found: np.uint64 = (bits * weights).sum(dtype=np.uint64)
    return found


@dataclass(frozen=True)
class DatasetPart:
    """What this rank brings to one dataset: which of its elements, and a call that gives them in that order.

    They are to be read slice by slice before the model changes.
    """

    dataset: on_disk.Dataset
    held: EvenRuns
    values: Callable[[], HeldElements]


@dataclass(frozen=True)
class Snapshot:
    """One state of a model and its optimizer.

    Attributes:
        step: optimizer steps done.
        world_size: number of ranks.
        table: the parameters.
        parts: in the order of the file.
        meta: what the manifest says; complete on world rank 0 only.
    """

    step: int
    world_size: int
    table: on_disk.Table
    parts: tuple[DatasetPart, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all datasets."""
        return sum(part.dataset.nbytes for part in self.parts)

    def copied(self) -> Snapshot:
        """The snapshot with all values copied now, so that the model may change. Not collective."""

        def copied(part: DatasetPart) -> DatasetPart:
            values = part.values()[0 : part.held.numel]
            return replace(part, values=lambda: values)

        return replace(self, parts=tuple(map(copied, self.parts)))


def take(
    sharding: Sharding,
    *,
    step: int,
    extra: Mapping[str, Any],
    slab_nbytes: int = on_disk.SLAB_NBYTES,
    inventory: Inventory | None = None,
) -> Snapshot:
    """Collect what a checkpoint holds; values are not read yet. Collective over world.

    Args:
        sharding: of the model.
        step: optimizer steps done.
        extra: of the user.
        slab_nbytes: bytes that one digest covers.
        inventory: what is kept; None: all of the model.

    Raises:
        ConfigError: ``extra`` cannot be written as JSON, or ranks disagree about it or ``step``; on every rank.
        CheckpointError: a state of the optimizer or of a module cannot be kept, or ranks have different optimizers; on
            every rank.
        StepError: values were changed behind hpczero's back, or ranks differ at stage 0; on every rank.
    """
    topology = sharding.topology
    _check_step(sharding, step)
    sharding.step.finish_updates()
    with topology.agreed("look at the values"):
        sharding.check_values()
    sharding.step.agreement.replicas.check()
    inventory = inventory or Inventory.create(sharding)
    base = Base.of(sharding) if inventory.only_trained else None
    buffers = states.buffers_of(sharding)
    with topology.agreed("take a snapshot"):
        kinds = inventory.state_kinds()
        _check_names(buffers, inventory.table, kinds)
        text = states.extra_text(extra)
        extra_states = states.states_of(sharding.model)
    states.check_equal(topology, text)
    with topology.watchdog.collective("checkpoint: what the optimizers of all ranks keep"):
        found = topology.world.comm.allgather(kinds)
    kinds = _merge_kinds(found)
    with topology.watchdog.collective("checkpoint: numbers of the optimizer, random streams"):
        scalars = topology.world.comm.gather(inventory.scalars(kinds))
        rng = topology.world.comm.gather(states.capture())
        all_states = topology.world.comm.gather(extra_states)

    table = inventory.table
    parts = [
        DatasetPart(
            on_disk.Dataset.of(on_disk.MASTER, "<f4", table.numel, slab_nbytes),
            inventory.held,
            inventory.values,
        )
    ]
    for key in kinds:
        if kinds[key] == "elements":
            dataset = on_disk.Dataset.of(
                on_disk.STATE + key, "<f4", table.trainable_numel, slab_nbytes
            )
            lengths = inventory.held_trainable
            parts.append(DatasetPart(dataset, lengths, partial(inventory.elements, key)))
    meta: dict[str, Any] = {}
    with topology.agreed("put the snapshot together"):
        if scalars is not None:
            meta["optimizer"] = _optimizer(sharding, kinds, scalars, table)
    parts.append(_buffers_part(sharding, buffers, slab_nbytes))
    row = sum(map(len, states.capture().values()))
    root_only = EvenRuns.of([(0, topology.size * row)] if topology.is_root else [])
    rng_bytes = torch.from_numpy(
        np.concatenate([stream for rank in rng for stream in rank.values()])
        if rng is not None
        else np.empty(0, dtype=np.uint8)
    )
    parts.append(
        DatasetPart(
            on_disk.Dataset.of(on_disk.RNG, "|u1", topology.size * row, slab_nbytes),
            root_only,
            lambda: rng_bytes,
        )
    )
    if topology.is_root:
        meta.update(
            {
                "buffers": [[kept.name, kept.dtype, list(kept.shape)] for kept in buffers],
                "rng": [[name, len(state)] for name, state in states.capture().items()],
                "loss_scale": sharding.scaler.state(),
                "skipped_steps": sharding.skipped_steps,
                "stage": int(sharding.plan.stage),
                "precision": sharding.precision.param,
                **({META: base.to_json()} if base is not None else {}),
                **(
                    {"optimizer_steps": sharding.collectives.calls.step}
                    if sharding.precision.sends_codes
                    else {}
                ),
                **({"tensor": topology.tensor.size} if topology.tensor.size > 1 else {}),
                **(
                    {states.STATES: kept} if (kept := states.of_all_ranks(all_states or [])) else {}
                ),
                **json.loads(text),
                "provenance": _provenance(),
            }
        )
    return Snapshot(step, topology.size, table, tuple(parts), meta)


def _check_step(sharding: Sharding, step: int) -> None:
    with sharding.topology.agreed("look at the step"):
        if type(step) is not int or not 0 <= step <= on_disk.MOST:
            raise ConfigError(
                f"save: got step {shown(step)}, expected a whole number, 0 to {on_disk.MOST}"
            )
    steps = sharding.topology.gather(float(step))
    odd = [rank for rank, other in enumerate(steps) if other != steps[0]]
    with sharding.topology.agreed("agree on the step"):
        if odd:
            raise ConfigError(
                f"save: ranks {odd[:8]} are at another step than rank 0 ({steps[odd[0]]:.0f} and {steps[0]:.0f}); "
                "every rank must save at the same step"
            )


def _check_names(
    buffers: Sequence[states.KeptBuffer], table: on_disk.Table, kinds: Mapping[str, str]
) -> None:
    names = [("parameter", row.name) for row in table.rows]
    names += [("buffer", buffer.name) for buffer in buffers]
    names += [("optimizer state", key) for key in kinds]
    for what, name in names:
        if type(name) is not str or not on_disk.is_text(name):
            raise CheckpointError(
                f"save: the {what} {shown(name)} has a name that is no text or holds half a character (a lone "
                "surrogate), which no file can keep; give it another name"
            )


def _merge_kinds(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Kinds of all ranks, in the order of the first rank that has any. A rank may own nothing."""
    merged: dict[str, str] = {}
    for rank, kinds in enumerate(found):
        for key, kind in kinds.items():
            if merged.setdefault(key, kind) != kind:
                raise CheckpointError(
                    f"rank {rank}: optimizer state {key!r} is {kind}, where a rank before has {merged[key]}; give "
                    "every rank the same optimizer"
                ).on_all_ranks()
    return merged


def _optimizer(
    sharding: Sharding,
    kinds: Mapping[str, str],
    scalars: Sequence[Mapping[str, Any]],
    table: on_disk.Table,
) -> dict[str, Any] | None:
    """Class, options and numbers of all optimizers together; on world rank 0 only."""
    optimizers = sharding.optimizers
    if not len(optimizers):
        return None
    present: dict[str, dict[str, Any]] = {key: {} for key in kinds}
    for rank, keys in enumerate(scalars):
        for key, values in keys.items():
            for name, value in values.items():
                if present[key].setdefault(name, value) != value:
                    raise CheckpointError(
                        f"rank {rank}: optimizer state {key!r} of {name!r} is {value!r}, where another rank has "
                        f"{present[key][name]!r}; ranks have made different steps"
                    )
    groups = []
    for place, group in enumerate(optimizers.groups):
        kept, left = states.options_of(group, place)
        groups.append(kept)
        for name, kind in left.items():
            sharding.advice.about_option(name, kind, place)
    counts = [len(optimizer.param_groups) for optimizer in optimizers]
    several = (
        {}
        if len(counts) == 1
        else {
            on_disk.SEVERAL: [list(pair) for pair in zip(optimizers.classes, counts, strict=True)]
        }
    )
    return {
        "class": ", ".join(optimizers.classes),
        **several,
        "groups": groups,
        "kinds": dict(kinds),
        "present": {key: compact(values, table) for key, values in present.items()},
    }


def compact(values: Mapping[str, Any], table: on_disk.Table) -> dict[str, Any]:
    """The entries of all trainable parameters in the order of the model, as one entry ``*`` if they are equal."""
    values = {row.name: values[row.name] for row in table.owners if row.name in values}
    distinct = set(values.values())
    if len(distinct) == 1 and len(values) == sum(not r.frozen for r in table.owners if r.numel):
        return {"*": distinct.pop()}
    return dict(values)


def expand(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The entries that ``compact`` was given."""
    return dict.fromkeys(names, values["*"]) if set(values) == {"*"} else dict(values)


def _buffers_part(
    sharding: Sharding, buffers: Sequence[states.KeptBuffer], slab_nbytes: int
) -> DatasetPart:
    """Persistent buffers of all stages, each from the first rank of its stage."""
    ends = np.cumsum([0, *(kept.nbytes for kept in buffers)], dtype=np.int64).tolist()
    named = states.named_buffers(sharding.model)
    places = [
        (kept, start)
        for kept, start in zip(buffers, ends[:-1], strict=True)
        if kept.nbytes and states.speaks_for(sharding.topology, kept)
    ]

    def values() -> Tensor:
        found = [bytes_of(named[kept.name].detach().cpu()) for kept, _ in places]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8, device="cpu")

    held = EvenRuns.of([(start, start + kept.nbytes) for kept, start in places])
    return DatasetPart(
        on_disk.Dataset.of(on_disk.BUFFERS, "|u1", ends[-1], slab_nbytes), held, values
    )


def _provenance() -> dict[str, Any]:
    return on_disk.programs() | {
        "hdf5": h5py.version.hdf5_version,
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "slurm_job": Environment.read().job,
    }
