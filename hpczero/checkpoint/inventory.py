"""What of a zeroified model and its optimizers goes into a checkpoint, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import Row, Table
from hpczero.checkpoint.held import Held, HeldPieces, Piece, StateHome, ValuesHome
from hpczero.errors import CheckpointError, CheckpointMismatch
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.away_states import AWAY, state_of, with_names

Scalar = int | float | bool

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Inventory:
    """One sharded model as a checkpoint sees it. Not collective unless a method says so.

    Attributes:
        table: parameters, in the order of this model.
        held: elements of the file whose values this rank holds, as (start, stop), ascending.
        held_trainable: the part of ``held`` that has optimizer state.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.table = _table(sharding)
        self._places = self.table.named()
        pieces = [piece for unit in sharding.units for piece in self._pieces_of(unit)]
        self._pieces = sorted(pieces, key=lambda piece: piece.start)
        self.held = [(piece.start, piece.start + piece.numel) for piece in self._pieces]
        limit = self.table.trainable_numel
        self.held_trainable = [run for run in self.held if run[0] < limit]

    def _pieces_of(self, unit: Unit) -> Iterator[Piece]:
        """What this rank holds of ``unit``."""
        layout = unit.spec.layout
        index = self._sharding.topology.shard_index
        begin = layout.shard_range(index).start
        for position, slot in enumerate(layout.slots):
            part = layout.overlap(index, slot.name)
            if part:
                place = self._places[slot.name].offset + part.start
                yield Piece(place, unit, position, slot.offset + part.start - begin, len(part))

    # --- values --------------------------------------------------------------------------------------------------

    def values(self) -> Held:
        """(elements of ``held``,) fp32, in that order, read slice by slice."""
        return HeldPieces(self._pieces, ValuesHome())

    def sink(self, key: str | None, order: Sequence[int]) -> HeldPieces:
        """Where values, or the state ``key``, are put slice by slice, on a tier or in memory.

        Args:
            key: of the state; None for values.
            order: of ``held``, or ``held_trainable``, in the file that they come from.
        """
        home = ValuesHome() if key is None else StateHome(key, self._states_by_piece(new=True))
        return HeldPieces([self._pieces[index] for index in order], home)

    @property
    def half(self) -> torch.dtype | None:
        """Of the parameters, if that holds less than fp32."""
        return _HALF.get(self._sharding.precision.param)

    def check_range(self, values: Tensor, path: Path) -> None:
        """Refuse values of ``path`` that are finite, but not in the precision of the model.

        ``values`` has the shape (elements of ``held``,).

        Raises:
            CheckpointMismatch: the message names the first parameter.
        """
        if self.half is None:
            return
        begin = 0
        for start, stop in self.held:
            part = values[begin : begin + stop - start]
            begin += len(part)
            check_range(part, self.half, self.table, start, path)

    def end_step(self) -> None:
        """Units that stay whole for a pass are given back, before values are set. Collective over world."""
        if self._sharding.schedule is not None:
            self._sharding.schedule.residence.end_step()

    def set_values(self, values: Tensor) -> None:
        """Set this model's values to ``values``, (elements of ``held``,) in that order. Collective over world."""
        self.end_step()
        for unit, owned in self._by_unit(values):
            # The ranks agree, since a tier may fail on one of them.
            with (
                self._sharding.topology.agreed(f"put back the values of {unit.spec.name!r}"),
                unit.owned_values(changes=True, anew=True) as here,
                torch.no_grad(),
            ):
                here.copy_(owned)
            unit.publish()

    def _by_unit(self, values: Tensor, *, trainable: bool = False) -> Iterator[tuple[Unit, Tensor]]:
        """``values``, in the order of the file, cut into each unit's ``owned_values``.

        One unit's copy exists at a time.
        """
        cuts: dict[Unit, list[tuple[int, int, int]]] = {
            unit: [] for unit in self._sharding.units if unit.spec.trainable or not trainable
        }
        start = 0
        for piece in self._pieces:
            if piece.unit in cuts:
                cuts[piece.unit].append((piece.begin, start, piece.numel))
                start += piece.numel
        for unit, pieces in cuts.items():
            owned = torch.empty(unit.owned_numel)
            for begin, start, count in pieces:
                owned[begin : begin + count] = values[start : start + count]
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
                stepper.parted.adopt()  # what a program has put there since the last step
        kinds: dict[str, str] = {}
        for _, state, numel in self._states():
            for key, value in state.items():
                kind = _kind(key, value, numel)
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
                row = self._places[unit.spec.layout.slots[position].name]
                state = self._state_of(unit, position).get(shard, {})
                yield row, with_names(state), shard.numel()

    def elements(self, key: str) -> Held:
        """(elements of ``held_trainable``,) fp32 of one elementwise state, read slice by slice; zero where none is."""
        return HeldPieces(self._trainable_pieces, StateHome(key, self._states_by_piece()))

    def _states_by_piece(self, *, new: bool = False) -> Callable[[Piece], MutableMapping[Any, Any]]:
        """What is in memory of the state of a piece; with ``new`` it is made if there is none."""
        shards = {
            (unit, position): shard
            for unit in self._sharding.units
            if unit.spec.trainable
            for position, shard in unit.owned_shards()
        }

        def state_of(piece: Piece) -> MutableMapping[Any, Any]:
            shard = shards[piece.unit, piece.position]
            states = self._state_of(piece.unit, piece.position)
            if new:
                states.setdefault(shard, {})
            state: MutableMapping[Any, Any] = states.get(shard, {})
            return state

        return state_of

    @property
    def _trainable_pieces(self) -> list[Piece]:
        """Those of ``held_trainable``; the trainable parameters come first in the file."""
        return self._pieces[: len(self.held_trainable)]

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
                    name = unit.spec.layout.slots[position].name
                    number = _scalar(kind, present[key][name])
                    if isinstance(number, Tensor) and id(shard) in on_device:
                        number = number.to(shard.device)
                    self._state_of(unit, position)[shard][key] = number
        self._sharding.step.adopt_state()

    def set_state(self, key: str, elements: Tensor, present: Mapping[str, Scalar | None]) -> None:
        """Set one elementwise state, in memory. Collective over world.

        Args:
            key: of the state.
            elements: (elements of ``held_trainable``,).
            present: the parameters that have it.
        """
        for unit, owned in self._by_unit(elements, trainable=True):
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

    @staticmethod
    def _is_in(unit: Unit, position: int, present: Mapping[str, Scalar | None]) -> bool:
        return unit.spec.layout.slots[position].name in present


def check_range(part: Tensor, dtype: torch.dtype, table: Table, start: int, path: Path) -> None:
    """Refuse a part of one parameter, from element ``start`` of ``table`` on, with finite values beyond ``dtype``.

    Raises:
        CheckpointMismatch: names the parameter.
    """
    if bool((part.isfinite() & part.to(dtype).isinf()).any()):
        (name,) = table.overlapping(start, start + len(part))
        raise CheckpointMismatch(
            f"{path}: {name} holds {part.abs().max().item():.6g}, which {dtype} cannot; take bf16 or fp32"
        )


def _kind(key: str, value: Any, numel: int) -> str | None:
    """``elements``, ``tensor:float32``, ``int`` ...; None for a state that does not exist yet."""
    if value is None:
        return None
    if value is AWAY:
        return "elements"
    if isinstance(value, Tensor):
        if not value.dim():
            return f"tensor:{str(value.dtype).removeprefix('torch.')}"
        if value.numel() == numel and value.dtype == torch.float32:
            return "elements"
        got = f"{tuple(value.shape)} {value.dtype}"
    else:
        if type(value) in (bool, int, float):
            return type(value).__name__
        got = type(value).__name__
    raise CheckpointError(
        f"optimizer state {key!r} is {got}, expected fp32 of the {numel} elements of its shard, or one number; such a "
        "state cannot be kept in a checkpoint"
    )


def _scalar(kind: str, number: Scalar | None) -> Any:
    """The state of one value that ``scalars`` gave."""
    assert number is not None, "scalars are numbers"
    if kind.startswith("tensor:"):
        return torch.tensor(number, dtype=getattr(torch, kind.removeprefix("tensor:")))
    return {"bool": bool, "int": int, "float": float}[kind](number)


def _table(sharding: Sharding) -> Table:
    groups: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for unit in sharding.units:
        for slot, group in zip(unit.spec.layout.slots, unit.spec.groups, strict=True):
            groups[slot.name], shapes[slot.name] = group, slot.shape
    by_object = {id(parameter): name for name, parameter in sharding.model.named_parameters()}
    aliases = {
        name: by_object[id(parameter)]
        for name, parameter in sharding.model.named_parameters(remove_duplicate=False)
        if by_object[id(parameter)] != name
    }
    return Table.build([(name, shapes[name], groups[name]) for name in by_object.values()], aliases)
