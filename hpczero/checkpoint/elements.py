"""The elements of a checkpoint on their way into a model, values and state of the optimizer.

Owns: two ways, ``WholeElements`` through memory, and ``Streamed`` straight to a memory tier. Must not know: manifests,
folders, what is not sharded. Every method is collective over world.

    read    everything is read and checked against its digests; the model is as it was
    check   values that the model's precision cannot hold are refused; the model is as it was
    give    the model gets them
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpczero.checkpoint.disk.format import (
    MASTER,
    STATE,
    STATE_FILE,
    Dataset,
    Manifest,
    Table,
    digest,
)
from hpczero.checkpoint.disk.rawfile import read_into
from hpczero.checkpoint.exchange import DatasetExchange, EvenRuns, check_range
from hpczero.checkpoint.held import Scalar
from hpczero.checkpoint.inventory import Inventory
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from hpczero.files.regular import open_regular, reason
from hpczero.job.topology import Topology
from hpczero.job.watchdog import Watchdog
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.away_shard import VALUES
from hpczero.zero.update.optimizer_state import check_name

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """One dataset, and the parts of it that this rank needs.

    Attributes:
        dataset: with its digests.
        runs: the parts, an entry each, in any order.
        order: of the entries, ascending in the file.
        exchange: of the parts in that order.
    """

    dataset: Dataset
    runs: EvenRuns
    order: list[int]
    exchange: DatasetExchange

    def arranged(self, held: Tensor) -> Tensor:
        """``held``, which is in the order of the file, in the order of the entries."""
        if self.order == sorted(self.order):
            return held
        ends = np.cumsum([self.runs.entries[index].numel for index in self.order])
        pieces = torch.tensor_split(held, ends[:-1].tolist())
        by_index = dict(zip(self.order, pieces, strict=True))
        return torch.cat([by_index[index] for index in range(len(self.runs))])


class SlabReader:
    """Reads datasets, each slab by one rank. Its methods are collective over world."""

    def __init__(self, path: Path, manifest: Manifest, topology: Topology) -> None:
        self._path = path
        self._manifest = manifest
        self._topology = topology

    def read(self, wanted: Sequence[tuple[str, EvenRuns]]) -> list[Tensor]:
        """For each dataset, the elements of its entries, one entry after the other. Collective over world.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
        """
        plans = [self.plan(name, runs) for name, runs in wanted]
        found: dict[str, Tensor] = {}
        with contextlib.closing(self.rounds(plans)) as rounds:
            for plan, windows, slabs in rounds:
                name = plan.dataset.name
                if name not in found:
                    found[name] = torch.empty(plan.exchange.numel, dtype=slabs.dtype, device="cpu")
                parts = [found[name][place] for place in plan.exchange.places(windows)]
                plan.exchange.from_slabs(slabs, parts, windows)
        # no element, no round
        return [
            plan.arranged(
                found.get(plan.dataset.name, torch.empty(0, dtype=torch.float32, device="cpu"))
            )
            for plan in plans
        ]

    def plan(self, name: str, runs: EvenRuns) -> Wanted:
        """Tell every rank which parts of a dataset this rank needs. Collective over world.

        Raises:
            CorruptCheckpoint: on every rank: there is no such dataset.
        """
        topology = self._topology
        order = np.argsort(runs.table[:, 0], kind="stable").tolist()
        exchange = DatasetExchange(topology.world.comm, topology.watchdog, runs.take(order))
        return Wanted(self._dataset(name), runs, order, exchange)

    def rounds(
        self, plans: Sequence[Wanted]
    ) -> Generator[tuple[Wanted, list[range], Tensor], None, None]:
        """Each round of each plan, with the windows of all ranks and this rank's slabs. Collective over world.

        The slabs have been checked, and are valid until the next round. While the caller works with them, the next are
        read and checked, also of the next dataset. Whoever may not take all rounds closes the generator.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
        """
        topology = self._topology
        pieces = [
            (plan, windows) for plan in plans for windows in plan.exchange.rounds(plan.dataset)
        ]
        own = [(plan.dataset, windows[topology.rank]) for plan, windows in pieces]
        with self._opened() as descriptor, _Ahead(topology.watchdog) as ahead:
            if own:
                ahead.start(self, descriptor, *own[0])
            for place, (plan, windows) in enumerate(pieces):
                name = plan.dataset.name
                with (
                    topology.watchdog.collective(f"checkpoint: reading {name}"),
                    topology.agreed(f"read {name}"),
                ):
                    data = ahead.take()
                    if place + 1 < len(own):
                        ahead.start(self, descriptor, *own[place + 1])
                    if place + 2 < len(own):
                        _announce(descriptor, *own[place + 2])
                yield plan, windows, torch.from_numpy(data.view(plan.dataset.dtype))

    def read_whole(self, name: str) -> Tensor:
        """All bytes of a small dataset, on every rank; rank 0 reads them. Collective over world.

        Raises:
            CorruptCheckpoint: on every rank.
        """
        topology, dataset = self._topology, self._dataset(name)
        data = None
        with self._opened() as descriptor, topology.agreed(f"read {dataset.name}"):
            if topology.is_root:
                data = np.empty(dataset.nbytes, dtype=np.uint8)
                self.fill(descriptor, dataset, range(dataset.numel), data)
        with topology.watchdog.collective(f"checkpoint: handing {dataset.name} out"):
            return torch.from_numpy(topology.world.comm.bcast(data))

    def fill(self, descriptor: int, dataset: Dataset, window: range, into: Bytes) -> None:
        """Read whole slabs, and check each against its digest. Not collective; any thread may call it.

        Raises:
            CorruptCheckpoint: on this rank.
        """
        try:
            read_into(descriptor, dataset.offset + window.start * dataset.itemsize, into)
        except (OSError, EOFError) as error:
            raise CorruptCheckpoint(
                f"{self._path}: {dataset.name} cannot be read: {error}"
            ) from error
        item = dataset.itemsize
        for start in range(window.start, window.stop, dataset.slab_numel):
            index = start // dataset.slab_numel
            slab = dataset.slab(index)
            begin = (slab.start - window.start) * item
            if digest(into[begin : begin + len(slab) * item]) != dataset.digests[index]:
                raise CorruptCheckpoint(self._manifest.damage(self._path, dataset, slab))

    def _dataset(self, name: str) -> Dataset:
        dataset = self._manifest.dataset(name)
        if dataset is None:  # the manifest is the same on all ranks
            error = CorruptCheckpoint(f"{self._path}: dataset {name} is not in it")
            error.agreed = True
            raise error
        return dataset

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        path = self._path / STATE_FILE
        with contextlib.ExitStack() as stack:
            with self._topology.agreed("open the checkpoint"):
                try:
                    descriptor = open_regular(path)
                except OSError as error:
                    raise CorruptCheckpoint(f"{path}: cannot be read ({reason(error)})") from error
                stack.callback(os.close, descriptor)
            yield descriptor


def _announce(descriptor: int, dataset: Dataset, window: range) -> None:
    """Have the kernel begin to read a window, so that a slow disk starts early."""
    offset = dataset.offset + window.start * dataset.itemsize
    nbytes = len(window) * dataset.itemsize
    if nbytes:  # none would mean all of the file
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


class _Ahead:
    """Reads the next window on a thread, into two buffers in turn.

    The buffers are kept: to touch fresh memory costs more than to read into it (docs/performance.md).
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpczero-read")
        self._buffers = [np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)]
        self._pending: Future[Bytes] | None = None

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        with self._watchdog.watch("checkpoint: the last read to end"):
            self._thread.shutdown()

    def start(self, reader: SlabReader, descriptor: int, dataset: Dataset, window: range) -> None:
        """Begin to read. What was taken last stays valid meanwhile."""
        self._buffers.reverse()
        nbytes = len(window) * dataset.itemsize
        if self._buffers[0].size < nbytes:
            self._buffers[0] = np.empty(nbytes, dtype=np.uint8)
        into = self._buffers[0][:nbytes]

        def read() -> Bytes:
            reader.fill(descriptor, dataset, window, into)
            return into

        self._pending = self._thread.submit(read)

    def take(self) -> Bytes:
        """Wait for what was begun, and return it.

        Raises:
            CorruptCheckpoint: as ``SlabReader.fill``.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "start comes before take"
        return pending.result()


@dataclass(frozen=True)
class ElementSource:
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


def elements_of(source: ElementSource, sharding: Sharding, inventory: Inventory) -> Elements:
    """The way for a model: what rests on a tier is larger than memory. Not collective."""
    way = WholeElements if sharding.away.store is None else Streamed
    return way(source, sharding, inventory)


class WholeElements:
    """Read once, and kept in memory until the model gets it."""

    def __init__(self, source: ElementSource, sharding: Sharding, inventory: Inventory) -> None:
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

    def __init__(self, source: ElementSource, sharding: Sharding, inventory: Inventory) -> None:
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
