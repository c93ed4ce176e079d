"""What of a zeroified model and its optimizers goes into a checkpoint, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import Row, Table, plain_name, some
from hpczero.checkpoint.exchange import EvenRuns, check_range
from hpczero.checkpoint.held import (
    HeldElements,
    HeldPieces,
    ParameterPiece,
    Scalar,
    StateHome,
    ValuesHome,
    kind_of,
    piece_of,
    scalar_of,
    with_padding,
)
from hpczero.errors import CheckpointError
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.plan.placement import ModelPart, Placement, part_of
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import state_of, with_names
from hpczero.zero.update.whole_states import is_packed

# The table of a whole model, of which every rank may have another part.
#
# Tensor ranks hold parts of a parameter, or all the same whole one. Pipeline stages hold different parameters, and some
# one tied weight twice. A checkpoint knows nothing of that: names, shapes and order are those of the whole model.

Rows = Sequence[tuple[str, tuple[int, ...], int]]  # name, shape, optimizer group


def share_of(sharding: Sharding) -> tuple[Table, Mapping[str, Placement]]:
    """The whole model's table, and the placements of this rank's parameters by their names in its model.

    Collective over world where ranks have parts of a model.

    Raises:
        CheckpointError: on every rank: the parts do not make one model; the message names a parameter.
    """
    part, topology = part_of(sharding.model), sharding.topology
    if part is None and not has_parts(topology):
        placements = _placements(sharding, None)
        return _merged([_rows(sharding, placements)], _whole(sharding)), placements
    with topology.agreed("look at this rank's part of the model"):
        placements = _placements(sharding, part)
        own = _rows(sharding, placements)
    with topology.watchdog.collective(
        "checkpoint: parts of tensor ranks, parameters of all stages"
    ):
        beside = topology.tensor.comm.allgather(list(placements.values()))
        stages = topology.pipeline.comm.allgather(own)
    with topology.agreed("compare the parts of tensor ranks"):
        _check_cuts(beside)
    with topology.agreed("put the tables of all stages together"):
        table = _merged(stages, part or _whole(sharding))
    _check_equal(sharding, table)
    return table, placements


def has_parts(topology: Topology) -> bool:
    """Whether ranks hold parts of a model, or more than one copy of it."""
    return topology.model_parallel.size > 1 or topology.replicate.size > 1


def check_cover(topology: Topology, table: Table, held: Mapping[str, int]) -> None:
    """Refuse ranks that together save not all elements of ``table``, or save some twice. Collective over world.

    Raises:
        CheckpointError: on every rank; the message names a parameter.
    """
    if not has_parts(topology):
        return
    rows = table.owners
    counts = np.array([held.get(row.name, 0) for row in rows], dtype=np.int64)
    with topology.watchdog.collective("checkpoint: elements that ranks hold"):
        topology.world.comm.Allreduce(MPI.IN_PLACE, counts, op=MPI.SUM)
    for row, count in zip(rows, counts.tolist(), strict=True):
        if count != row.numel:
            raise CheckpointError(
                f"ranks hold {count:,} elements of {row.name!r} together, expected the {row.numel:,} of its shape "
                f"{row.shape}: its parts do not make it whole; see that each part has another number, and that of "
                "equal copies one is counted (plan.placement.Placement)"
            ).on_all_ranks()


def _placements(sharding: Sharding, part: ModelPart | None) -> dict[str, Placement]:
    """Of each parameter of this rank's model, by its name there."""
    found: dict[str, Placement] = {}
    names: dict[str, str] = {}
    for unit in sharding.units:
        for slot in unit.spec.layout.slots:
            placement = part.placement(slot.name, slot.shape) if part else None
            placement = placement or Placement(slot.name, slot.shape)
            found[slot.name] = placement = replace(placement, name=plain_name(placement.name))
            if names.setdefault(placement.name, slot.name) != slot.name:
                raise CheckpointError(
                    f"rank {sharding.topology.rank}: parameters {names[placement.name]!r} and {slot.name!r} both have "
                    f"the name {placement.name!r} in a checkpoint; give one another name"
                )
            if placement.local_shape != slot.shape:
                raise CheckpointError(
                    f"rank {sharding.topology.rank}: parameter {slot.name!r} is {slot.shape}, expected "
                    f"{placement.local_shape}: part {placement.part} of {placement.parts} of {placement.name!r}, which "
                    f"is {placement.shape}; build the parameter by its placement"
                )
    return found


def _rows(sharding: Sharding, placements: Mapping[str, Placement]) -> Rows:
    return [
        (placements[slot.name].name, placements[slot.name].shape, group)
        for unit in sharding.units
        for slot, group in zip(unit.spec.layout.slots, unit.spec.groups, strict=True)
    ]


def _whole(sharding: Sharding) -> ModelPart:
    by_object = {id(parameter): name for name, parameter in sharding.model.named_parameters()}
    aliases = {
        name: by_object[id(parameter)]
        for name, parameter in sharding.model.named_parameters(remove_duplicate=False)
        if by_object[id(parameter)] != name
    }
    return ModelPart(tuple(by_object.values()), aliases)


def _merged(stages: Sequence[Rows], part: ModelPart) -> Table:
    """One table of what all stages have, in the order of the whole model."""
    aliases = {plain_name(name): plain_name(owner) for name, owner in part.aliases.items()}
    part = ModelPart(tuple(map(plain_name, part.names)), aliases)
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for stage, rows in enumerate(stages):
        for name, shape, group in rows:
            before = found.setdefault(name, (tuple(shape), group))
            if before != (tuple(shape), group):
                raise CheckpointError(
                    f"{name!r} is {_told(tuple(shape), group)} on stage {stage}, and {_told(*before)} on a stage "
                    "before; give a tied weight the same shape and the same group of the optimizer on both stages"
                )
    for what, names in (
        ("no stage has", [name for name in part.names if name not in found]),
        ("the whole model does not name", [name for name in found if name not in set(part.names)]),
    ):
        if names:
            raise CheckpointError(
                f"{what} {some(names)}; every parameter in ModelPart.names is on one stage at "
                "least, and no other is on any"
            )
    return Table.build([(name, *found[name]) for name in part.names], part.aliases)


def _check_cuts(ranks: Sequence[Sequence[Placement]]) -> None:
    """Refuse tensor ranks that cut a parameter differently, or save the same part of it."""
    found: dict[str, list[Placement]] = {}
    for placement in (placement for rank in ranks for placement in rank if placement.counted):
        others = found.setdefault(placement.name, [])
        for other in others:
            if replace(other, part=0) != replace(placement, part=0) or other.part == placement.part:
                raise CheckpointError(
                    f"two tensor ranks hold part {other.part} of {other.parts} and part {placement.part} of "
                    f"{placement.parts} of {placement.name!r}, expected other parts of one cut: got {other} and "
                    f"{placement}; give each rank its own part, and count one of equal copies"
                )
        others.append(placement)


def _told(shape: tuple[int, ...], group: int) -> str:
    return f"{shape} and {'frozen' if group < 0 else f'in group {group} of the optimizer'}"


def _check_equal(sharding: Sharding, table: Table) -> None:
    topology = sharding.topology
    differs = unlike(topology.world, list(_lines(sharding, table)))
    with topology.agreed("compare the tables of all ranks"):
        if differs:
            here, there = (some(text.split("; "), "; ") for text in differs)
            raise CheckpointError(
                f"rank {topology.rank}: the whole model has {here}, where rank 0 has {there}; "
                "give every rank a part of the same model, and the same groups of the optimizer"
            )


def _lines(sharding: Sharding, table: Table) -> Iterator[str]:
    groups, classes = len(sharding.optimizers.groups), sharding.optimizers.classes
    yield f"{groups} group(s) of {', '.join(classes) or 'no optimizer'}"
    for place, row in enumerate(table.rows):
        tied = "" if row.tied_to is None else f", tied to {table.rows[row.tied_to].name!r}"
        yield f"{row.name!r} at place {place} of {_told(row.shape, row.group)}{tied}"


# Averages of weights in a checkpoint: what stands for them among the states of the optimizer.
#
#     average.ema           fp32 of each trained element, as any state of the optimizer
#     average.ema.count     with each parameter: how many updates

PREFIX = "average."
COUNT = ".count"


def averages_of(sharding: Sharding, unit: Unit, position: int) -> dict[str, Any]:
    """What is kept with this rank's part of the parameter in a slot of ``unit``, by keys."""
    found: dict[str, Any] = {}
    for name, average in sharding.averages.items():
        if average.count:
            found[PREFIX + name] = average.part(unit, position)
            found[PREFIX + name + COUNT] = average.count
    return found


def names_in(keys: Iterable[str]) -> list[str]:
    """Names of the averages of which there are elements."""
    averages = (key.removeprefix(PREFIX) for key in keys if key.startswith(PREFIX))
    return [name for name in averages if not name.endswith(COUNT)]


def set_counts(sharding: Sharding, present: Mapping[str, Mapping[str, Scalar | None]]) -> None:
    """Each average has as many updates as a checkpoint says, none where it has no such average.

    Args:
        sharding: of the model.
        present: for each key and parameter its number.
    """
    for name, average in sharding.averages.items():
        counts = present.get(PREFIX + name + COUNT, {}).values()
        average.count = max((int(count) for count in counts if count is not None), default=0)


_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Inventory:
    """One sharded model as a checkpoint sees it. Not collective unless a method says so.

    Attributes:
        plan: that it is of.
        only_trained: whether the checkpoint has the trainable parameters alone.
        table: parameters of the whole model, in its order; those that train, where the checkpoint has no others.
        units: that have them.
        held: elements of the file that this rank saves: of equal copies one.
        held_trainable: the part of ``held`` that has optimizer state.
        needed: elements of the file that this rank loads; one entry for each of ``rows``.
        needed_trainable: the part of ``needed`` that has optimizer state.
    """

    def __init__(
        self,
        sharding: Sharding,
        table: Table,
        placements: Mapping[str, Placement],
        *,
        only_trained: bool,
    ) -> None:
        self._sharding, self.plan, self._placements = sharding, sharding.plan, placements
        self.only_trained = only_trained
        self.table = table.trained() if only_trained else table
        self.units = [unit for unit in sharding.units if unit.spec.trainable or not only_trained]
        self._places = self.table.named()
        pieces = [piece for unit in self.units for piece in self._pieces_of(unit)]
        self._empty = [piece for piece in pieces if not piece.numel]  # padding and nothing else
        self._pieces = sorted((p for p in pieces if p.numel), key=lambda piece: piece.start)
        self._saved = [piece for piece in self._pieces if piece.counted]
        self.held, self.held_trainable = self._runs(self._saved)
        self.needed, self.needed_trainable = self._runs(self._pieces)

    @classmethod
    def create(cls, sharding: Sharding, *, only_trained: bool = False) -> Inventory:
        """That of a model. Collective over world where ranks have parts of a model, or replicas.

        Raises:
            CheckpointError: on every rank: the parts do not make one model; the message names a parameter.
        """
        with sharding.topology.agreed("take stock of the model"):
            for average in sharding.averages.values():
                average.check_out("a checkpoint")
        table, placements = share_of(sharding)
        found = cls(sharding, table, placements, only_trained=only_trained)
        held: Counter[str] = Counter()
        for piece in found._saved:
            held[found._row(piece.unit, piece.position).name] += piece.numel
        check_cover(sharding.topology, found.table, held)
        return found

    def _runs(self, pieces: Sequence[ParameterPiece]) -> tuple[EvenRuns, EvenRuns]:
        """Where they lie in the file, and the trainable ones, which come first there."""
        runs = EvenRuns.of([piece.in_file for piece in pieces])
        limit = self.table.trainable_numel
        return runs, runs.take(range(sum(piece.start < limit for piece in pieces)))

    def _pieces_of(self, unit: Unit) -> Iterator[ParameterPiece]:
        layout, topology = unit.spec.layout, self._sharding.topology
        index = topology.shard_index
        begin = layout.shard_range(index).start
        for position, slot in enumerate(layout.slots):
            part = layout.overlap(index, slot.name)
            if part:
                placement = self._placements[slot.name]
                place = self._places[placement.name].offset
                counted = placement.counted and topology.replicate.rank == 0
                yield piece_of(unit, position, part, slot.offset - begin, placement, place, counted)

    def _row(self, unit: Unit, position: int) -> Row:
        return self._places[self._placements[unit.spec.layout.slots[position].name].name]

    def frozen_pieces(self) -> Iterator[tuple[Row, ParameterPiece]]:
        """What this rank saves of frozen parameters, each with the whole parameter."""
        for piece in self._saved:
            if not piece.unit.spec.trainable:
                yield self._row(piece.unit, piece.position), piece

    @property
    def rows(self) -> list[Row]:
        """The whole parameter of each entry of ``needed``."""
        return [self._row(piece.unit, piece.position) for piece in self._pieces]

    @property
    def names(self) -> Mapping[str, str]:
        """Names in the whole model of this rank's parameters, by those in its model."""
        return {local: placement.name for local, placement in self._placements.items()}

    # --- values --------------------------------------------------------------------------------------------------

    def values(self) -> HeldElements:
        """(elements of ``held``,) fp32, in that order, read slice by slice."""
        return HeldPieces(self._saved, ValuesHome())

    def sink(self, key: str | None, order: Sequence[int]) -> HeldPieces:
        """Where values, or the state ``key``, are put slice by slice, on a tier or in memory. Padding is made zero.

        ``order`` is that of ``needed``, or ``needed_trainable``, in the file that they come from.

        Raises:
            TierError: a tier cannot take the padding.
        """
        home = ValuesHome() if key is None else StateHome(key, self._states_by_piece(new=True))
        held = HeldPieces([self._pieces[index] for index in order], home)
        held.clear_empty(p for p in self._empty if key is None or p.unit.spec.trainable)
        return held

    @property
    def half(self) -> torch.dtype | None:
        """Of the parameters, if that holds less than fp32."""
        return _HALF.get(self._sharding.precision.param)

    def check_range(self, values: Tensor, path: Path) -> None:
        """Refuse ``values``, (elements of ``needed``,), that are finite, but not in the precision of the model.

        Raises:
            CheckpointMismatch: the message names the first parameter.
        """
        if self.half is None:
            return
        begin = 0
        for piece in self._pieces:
            part = values[begin : begin + piece.numel]
            begin += len(part)
            entry = piece.in_file
            check_range(part, self.half, self.table, entry.start, path, stop=entry.stop)

    def end_step(self) -> None:
        """Units that stay whole for a pass are given back, before values are set. Collective over world."""
        if self._sharding.schedule is not None:
            self._sharding.schedule.residence.end_step()

    def set_values(self, values: Tensor) -> None:
        """Set this model's values to ``values``, (elements of ``needed``,) in that order. Collective over world."""
        self.end_step()
        # Stages have different units: what is wrong with one is known to its ranks first, and to all at the end.
        error: Exception | None = None
        try:
            for unit, owned in self._by_unit(values):
                self._put(unit, owned)
        except Exception as caught:
            error = caught
        with self._sharding.topology.agreed("put the values back"):
            if error is not None:
                raise error

    def _put(self, unit: Unit, owned: Tensor) -> None:
        """Set a unit's values. Collective over the ranks that share it."""
        # They agree, since a tier may fail on one of them.
        with (
            self._sharding.topology.shard.agreed(f"put back the values of {unit.spec.name!r}"),
            unit.owned_values(changes=True, anew=True) as here,
            torch.no_grad(),
        ):
            here.copy_(owned)
        unit.publish()

    def _by_unit(self, values: Tensor, *, trainable: bool = False) -> Iterator[tuple[Unit, Tensor]]:
        """``values``, in the order of the file, cut into each unit's ``owned_values``; padding is zero.

        One unit's copy exists at a time.
        """
        cuts: dict[Unit, list[tuple[ParameterPiece, int]]] = {
            unit: [] for unit in self.units if unit.spec.trainable or not trainable
        }
        start = 0
        for piece in self._pieces:
            if piece.unit in cuts:
                cuts[piece.unit].append((piece, start))
                start += piece.numel
        for unit, pieces in cuts.items():
            owned = torch.empty(unit.owned_numel, dtype=torch.float32, device="cpu")
            if self._empty:
                owned.zero_()
            for piece, start in pieces:
                begin, end = piece.place(0, piece.numel)
                own = values[start : start + piece.numel]
                owned[begin:end] = with_padding(piece, begin, end, own)
            yield unit, owned

    # --- optimizers ----------------------------------------------------------------------------------------------

    def _state_of(self, unit: Unit, position: int) -> MutableMapping[Any, Any]:
        """The state of the optimizer that has the parameter in this slot, by shards."""
        return self._sharding.optimizers.of_group(unit.spec.groups[position]).state

    def state_kinds(self) -> dict[str, str]:
        """For each key of the optimizers' state on this rank: ``elements``, or the type of its scalar.

        Raises:
            CheckpointError: a state is neither fp32 with the parameter's shape nor one number.
        """
        for stepper in self._sharding.step.steppers:
            if stepper.streams:
                stepper.update.adopt()  # what a program has put there since the last step
        kinds: dict[str, str] = {}
        for _, state, numel in self._states():
            for key, value in state.items():
                kind = kind_of(key, value, numel, packed=is_packed(state, key))
                if kind is not None and kinds.setdefault(key, kind) != kind:
                    raise CheckpointError(
                        f"optimizer state {key!r} is {kinds[key]} for some parameters and {kind} for others, expected "
                        "one kind"
                    )
        return kinds

    def _states(self) -> Iterator[tuple[Row, Mapping[str, Any], int]]:
        """Row, state and elements of every part of a trainable parameter that this rank owns."""
        for unit in self._sharding.units:
            if not unit.spec.trainable:
                continue
            for position, shard in unit.owned_shards():
                row = self._row(unit, position)
                state = with_names(self._state_of(unit, position).get(shard, {}))
                averages = averages_of(self._sharding, unit, position)
                yield row, {**state, **averages} if averages else state, shard.numel()

    def elements(self, key: str) -> HeldElements:
        """(elements of ``held_trainable``,) fp32 of one elementwise state, read slice by slice; zero where none is."""
        # The trainable ones come first in the file
        pieces = self._saved[: len(self.held_trainable)]
        return HeldPieces(pieces, StateHome(key, self._states_by_piece()))

    def _states_by_piece(
        self, *, new: bool = False
    ) -> Callable[[ParameterPiece], MutableMapping[Any, Any]]:
        """What is in memory of the state of a piece; with ``new`` it is made if there is none."""
        shards = {
            (unit, position): shard
            for unit in self._sharding.units
            if unit.spec.trainable
            for position, shard in unit.owned_shards()
        }

        def state_of(piece: ParameterPiece) -> MutableMapping[Any, Any]:
            shard = shards[piece.unit, piece.position]
            states = self._state_of(piece.unit, piece.position)
            if new:
                states.setdefault(shard, {})
            state: MutableMapping[Any, Any] = states.get(shard, {})
            averages = averages_of(self._sharding, piece.unit, piece.position)
            return {**state, **averages} if averages and not new else state

        return state_of

    def scalars(self, kinds: Mapping[str, str]) -> dict[str, dict[str, Scalar | None]]:
        """For each key and each parameter that this rank owns parts of: its number; None for a tensor."""
        found: dict[str, dict[str, Scalar | None]] = {key: {} for key in kinds}
        for row, state, _ in self._states():
            for key, kind in kinds.items():
                if state.get(key) is not None:
                    value = state[key]
                    plain = (
                        value.item() if isinstance(value, Tensor) and kind != "elements" else value
                    )
                    found[key][row.name] = None if kind == "elements" else plain
        return found

    def set_optimizer(
        self,
        give: Callable[[str], None],
        kinds: Mapping[str, str],
        present: Mapping[str, Mapping[str, Scalar | None]],
    ) -> None:
        """Give the optimizers their state. Collective over world.

        Args:
            give: sets an elementwise state, by ``set_state`` or ``note_away``; collective.
            kinds: of all keys, in the order in which the optimizers made them.
            present: for each key, the parameters that have it, with the number of a scalar.
        """
        self._sharding.step.forget_state()
        set_counts(self._sharding, present)
        kinds = {key: kind for key, kind in kinds.items() if not key.endswith(COUNT)}
        for unit, position, shard in self._trained():
            self._state_of(unit, position).pop(shard, None)
        # Steps are counted where the update is computed, as torch's own load_state_dict has it.
        on_device = {
            id(shard)
            for group in self._sharding.optimizers.groups
            if group.get("fused") or group.get("capturable")
            for shard in group["params"]
        }
        for key, kind in kinds.items():
            if kind == "elements":
                give(key)
                continue
            for unit, position, shard in self._trained():
                if self._is_in(unit, position, present[key]):
                    number = scalar_of(kind, present[key][self._row(unit, position).name])
                    if isinstance(number, Tensor) and id(shard) in on_device:
                        number = number.to(shard.device)
                    self._state_of(unit, position)[shard][key] = number
        self._sharding.step.adopt_state()

    def set_state(self, key: str, elements: Tensor, present: Mapping[str, Scalar | None]) -> None:
        """Set one elementwise state, (elements of ``needed_trainable``,), of the parameters in ``present``, in memory.

        Collective over world.
        """
        name = key.removeprefix(PREFIX)
        average = self._sharding.averages.get(name) if name != key else None
        for unit, owned in self._by_unit(elements, trainable=True):
            if average is not None:
                average.load(unit, owned)
                continue
            replicated = unit.replicated(owned)
            for position, (shard, value) in zip(unit.optimized.slots, replicated, strict=True):
                if self._is_in(unit, position, present):
                    held = self._state_of(unit, position)[shard]
                    held[key] = value.to(shard.device, copy=True)

    def note_away(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        """One elementwise state was put where it rests; the parameters in ``present`` have it. Not collective."""
        for unit, position, shard in self._trained():
            states = self._state_of(unit, position)
            if unit.away is None:
                if not self._is_in(unit, position, present) and shard in states:
                    states[shard].pop(key, None)
                    if not states[shard]:
                        del states[shard]
            elif self._is_in(unit, position, present):
                state_of(states, shard).elementwise[key] = None

    def _trained(self) -> Iterator[tuple[Unit, int, nn.Parameter]]:
        """Unit, slot and shard of all that the optimizers of this rank step on."""
        for unit in self._sharding.units:
            if unit.spec.trainable:
                for position, shard in zip(unit.optimized.slots, unit.shards, strict=True):
                    yield unit, position, shard

    def _is_in(self, unit: Unit, position: int, present: Mapping[str, Scalar | None]) -> bool:
        return self._row(unit, position).name in present
