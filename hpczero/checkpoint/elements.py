"""The elements of a checkpoint on their way into a model, values and state of the optimizer.

Owns: two ways, ``Whole`` through memory, and ``Streamed`` straight to a memory tier. Must not know: manifests, folders,
what is not sharded. Every method is collective over world.

    read    everything is read and checked against its digests; the model is as it was
    check   values that the model's precision cannot hold are refused; the model is as it was
    give    the model gets them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hpczero.checkpoint.disk.format import MASTER, STATE, Table
from hpczero.checkpoint.exchange import EvenRuns, check_range
from hpczero.checkpoint.held import Scalar
from hpczero.checkpoint.inventory import Inventory
from hpczero.checkpoint.slab_reader import SlabReader, Wanted
from hpczero.errors import CheckpointMismatch
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.away_shard import VALUES
from hpczero.zero.update.away_states import check_name


@dataclass(frozen=True)
class Source:
    """Where elements come from, and what of them this rank holds.

    Attributes:
        path: of the checkpoint.
        reader: of its datasets.
        table: its parameters.
        needed: elements of it that are the inventory's ``needed``, in that order.
        trainable: those that have state.
        keys: of the elementwise state.
    """

    path: Path
    reader: SlabReader
    table: Table
    needed: EvenRuns
    trainable: EvenRuns
    keys: Sequence[str]


class Elements(Protocol):
    """One of the two ways."""

    def read(self) -> None:
        """Read everything.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
        """
        ...

    def check(self) -> None:
        """Refuse values that are finite, but not in the precision of the model.

        Raises:
            CheckpointMismatch: on every rank; the message names a parameter.
        """
        ...

    def give_values(self) -> None:
        """Set the values of the model."""
        ...

    def give_state(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        """Set one state of the optimizer; ``present`` are the parameters that have it."""
        ...


def elements_of(source: Source, sharding: Sharding, inventory: Inventory) -> Elements:
    """The way for a model: what rests on a tier is larger than memory. Not collective."""
    way = Whole if sharding.away.store is None else Streamed
    return way(source, sharding, inventory)


class Whole:
    """Read once, and kept in memory until the model gets it."""

    def __init__(self, source: Source, sharding: Sharding, inventory: Inventory) -> None:
        """Nothing is read yet."""
        self._source, self._topology, self._inventory = source, sharding.topology, inventory
        self._states: dict[str, Tensor] = {}
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def read(self) -> None:
        """As of either way."""
        source = self._source
        wanted = [(MASTER, source.needed)]
        wanted += [(STATE + key, source.trainable) for key in source.keys]
        self._values, *states = source.reader.read(wanted)
        self._states = dict(zip(source.keys, states, strict=True))

    def check(self) -> None:
        """As of either way."""
        with self._topology.agreed("hold the values against the precision of the model"):
            self._inventory.check_range(self._values, self._source.path)

    def give_values(self) -> None:
        """As of either way."""
        self._inventory.set_values(self._values)
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")  # room for the optimizer's

    def give_state(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        """As of either way; gone from memory with the last unit, so that no more than one key is there twice."""
        self._inventory.set_state(key, self._states.pop(key), present)


class Streamed:
    """Read twice: first to find damage while the model is as it was, then a round at a time to where it rests."""

    def __init__(self, source: Source, sharding: Sharding, inventory: Inventory) -> None:
        """Nothing is read yet."""
        self._source, self._sharding, self._inventory = source, sharding, inventory
        self._topology = sharding.topology
        self._plans: dict[str, Wanted] = {}
        self._refused: CheckpointMismatch | None = None

    def read(self) -> None:
        """As of either way; what is read is not kept.

        Raises:
            StepError: the tier has no room for such a state.
        """
        source, topology = self._source, self._topology
        with topology.agreed("look for room on the memory tier"):
            for unit in self._sharding.units:
                if unit.away is not None:
                    for key in source.keys:
                        check_name(unit.away, key)
        self._plans[MASTER] = source.reader.plan(MASTER, source.needed)
        for key in source.keys:
            self._plans[STATE + key] = source.reader.plan(STATE + key, source.trainable)
        half = self._inventory.half
        with closing(source.reader.rounds(list(self._plans.values()))) as rounds:
            for plan, windows, slabs in rounds:
                if half is not None and plan is self._plans[MASTER] and self._refused is None:
                    with topology.agreed("hold the values against the precision of the model"):
                        self._look_at(slabs, windows[topology.rank], half)

    def _look_at(self, slabs: Tensor, window: range, half: torch.dtype) -> None:
        """Note what ``check`` will refuse of the slabs that this rank has read."""
        for row in self._source.table.owners:
            start, stop = max(row.offset, window.start), min(row.offset + row.numel, window.stop)
            if start < stop:
                part = slabs[start - window.start : stop - window.start]
                try:
                    check_range(part, half, self._source.table, start, self._source.path)
                except CheckpointMismatch as error:
                    self._refused = error
                    return

    def check(self) -> None:
        """As of either way."""
        with self._topology.agreed("hold the values against the precision of the model"):
            if self._refused is not None:
                raise self._refused

    def give_values(self) -> None:
        """As of either way."""
        self._inventory.end_step()
        self._bring(MASTER, VALUES)
        for unit in self._inventory.units:
            unit.publish()

    def give_state(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        """As of either way."""
        self._bring(STATE + key, key)
        self._inventory.note_away(key, present)

    def _bring(self, name: str, part: str) -> None:
        """From dataset ``name`` to ``part`` on the tier, or to wherever it rests.

        Raises:
            CorruptCheckpoint, TierError: on every rank; the model has some of it.
        """
        topology, plan = self._topology, self._plans[name]
        shards = [unit.away for unit in self._inventory.units if unit.away is not None]
        # Whatever went wrong with what was there does not matter any more.
        with topology.agreed(f"make room for {name}"):
            for shard in shards:
                if part in shard.parts:
                    shard.drop([part])
            held = self._inventory.sink(None if name == MASTER else part, plan.order)
        with closing(self._source.reader.rounds([plan])) as rounds:
            for _, windows, slabs in rounds:
                places = plan.exchange.places(windows)
                parts = [
                    torch.empty(place.stop - place.start, dtype=torch.float32, device="cpu")
                    for place in places
                ]
                plan.exchange.from_slabs(slabs, parts, windows)
                with topology.agreed(f"put {name} where it rests"):
                    for place, values in zip(places, parts, strict=True):
                        held[place] = values
        with topology.agreed(f"put {name} where it rests"):
            for shard in shards:
                if part in shard.parts:
                    shard.settle(part)
