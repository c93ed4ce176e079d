"""The elements of a checkpoint on their way into a model, values and state of the optimizer.

There are two ways, ``WholeElements`` through memory, and ``Streamed`` straight to a memory tier. Every method is
collective over world.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.exchange import DatasetExchange, EvenRuns, check_range
from hpczero.checkpoint.held import Scalar
from hpczero.checkpoint.inventory import Inventory
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from hpczero.files.direct import read_into
from hpczero.files.regular import WHY, Explained, open_regular
from hpczero.job.topology import Topology
from hpczero.job.watchdog import Watchdog
from hpczero.zero.units.away_shard import VALUES
from hpczero.zero.update.optimizer_state import check_name

Bytes = npt.NDArray[np.uint8]
Runs = Mapping[str, EvenRuns]


@dataclass(frozen=True)
class Wanted:
    """One dataset, and the parts of it that this rank needs.

    Attributes:
        dataset: with its digests.
        runs: the parts, an entry each, in any order.
        order: of the entries, ascending in the file.
        exchange: of the parts in that order.
    """

    dataset: on_disk.Dataset
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

    def __init__(self, path: Path, manifest: on_disk.Manifest, topology: Topology) -> None:
        self.path, self.manifest, self.topology = path, manifest, topology

    def read(self, wanted: Runs) -> list[Tensor]:
        """For each dataset, the elements of its entries, one entry after the other. Collective over world.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
        """
        plans = [self.plan(name, runs) for name, runs in wanted.items()]
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
        topology = self.topology
        order = np.argsort(runs.table[:, 0], kind="stable").tolist()
        exchange = DatasetExchange(topology.world.comm, topology.watchdog, runs.take(order))
        return Wanted(self._dataset(name), runs, order, exchange)

    def rounds(
        self, plans: Sequence[Wanted]
    ) -> Generator[tuple[Wanted, list[range], Tensor], None, None]:
        """Each round of each plan, with the windows of all ranks and this rank's slabs. Collective over world.

        The slabs have been checked, and are valid until the next round; the next slabs are read and checked meanwhile.
        Whoever may not take all rounds closes the generator.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
        """
        topology = self.topology
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
        topology, dataset = self.topology, self._dataset(name)
        data = None
        with self._opened() as descriptor, topology.agreed(f"read {dataset.name}"):
            if topology.is_root:
                data = np.empty(dataset.nbytes, dtype=np.uint8)
                self.fill(descriptor, dataset, range(dataset.numel), data)
        with topology.watchdog.collective(f"checkpoint: handing {dataset.name} out"):
            return torch.from_numpy(topology.world.comm.bcast(data))

    def fill(self, descriptor: int, dataset: on_disk.Dataset, window: range, into: Bytes) -> None:
        """Read whole slabs, and check each against its digest. Not collective; any thread may call it.

        Raises:
            CorruptCheckpoint: on this rank.
        """
        try:
            read_into(descriptor, dataset.offset + window.start * dataset.itemsize, into)
        except (OSError, EOFError) as error:
            raise CorruptCheckpoint(
                f"{self.path}: {dataset.name} cannot be read: {error}"
            ) from error
        item = dataset.itemsize
        for start in range(window.start, window.stop, dataset.slab_numel):
            index = start // dataset.slab_numel
            slab = dataset.slab(index)
            begin = (slab.start - window.start) * item
            if on_disk.digest(into[begin : begin + len(slab) * item]) != dataset.digests[index]:
                raise CorruptCheckpoint(self.manifest.damage(self.path, dataset, slab))

    def _dataset(self, name: str) -> on_disk.Dataset:
        dataset = self.manifest.dataset(name)
        if dataset is None:  # the manifest is the same on all ranks
            raise CorruptCheckpoint(f"{self.path}: dataset {name} is not in it").on_all_ranks()
        return dataset

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        path = self.path / on_disk.STATE_FILE
        with contextlib.ExitStack() as stack:
            unread = Explained(CorruptCheckpoint, f"{path}: cannot be read ({WHY})")
            with self.topology.agreed("open the checkpoint"), unread:
                descriptor = open_regular(path)
                stack.callback(os.close, descriptor)
            yield descriptor


def _announce(descriptor: int, dataset: on_disk.Dataset, window: range) -> None:
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

    def start(
        self, reader: SlabReader, descriptor: int, dataset: on_disk.Dataset, window: range
    ) -> None:
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
        pending, self._pending = self._pending, None
        assert pending is not None, "start comes before take"
        return pending.result()


class WholeElements:
    """Elements of a checkpoint, read once, and kept in memory until the model gets them."""

    def __init__(self, reader: SlabReader, wanted: Runs, inventory: Inventory) -> None:
        """Nothing is read yet.

        Args:
            reader: of the checkpoint's datasets.
            wanted: by dataset, the elements that are the inventory's ``needed`` or ``needed_trainable``, in that order.
            inventory: of the model.
        """
        self._reader, self._wanted, self._inventory = reader, wanted, inventory
        self._topology = reader.topology
        self._found: dict[str, Tensor] = {}

    def read(self) -> None:
        """Read everything; the model is as it was.

        Raises:
            CorruptCheckpoint: on every rank; the message names dataset, parameters and range.
            StepError: the tier has no room for such a state.
        """
        self._found = dict(zip(self._wanted, self._reader.read(self._wanted), strict=True))

    def check(self) -> None:
        """Refuse values that are finite, but not in the precision of the model, which is as it was.

        Raises:
            CheckpointMismatch: on every rank; the message names a parameter.
        """
        with self._topology.agreed("hold the values against the precision of the model"):
            self._inventory.check_range(self._found[on_disk.MASTER], self._reader.path)

    def give_values(self) -> None:
        """Set the values of the model."""
        self._inventory.set_values(self._found[on_disk.MASTER])
        del self._found[on_disk.MASTER]  # room for the optimizer's

    def give_state(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        """Set one state of the optimizer; ``present`` are the parameters that have it."""
        # Gone from memory with the last unit, so that no more than one key is there twice.
        self._inventory.set_state(key, self._found.pop(on_disk.STATE + key), present)


class Streamed(WholeElements):
    """Read twice: first to find damage while the model is as it was, then a round at a time to where it rests."""

    @override
    def read(self) -> None:
        topology, half = self._topology, self._inventory.half
        with topology.agreed("look for room on the memory tier"):
            for unit in self._inventory.units:
                if unit.away is not None:
                    for name in self._wanted.keys() - {on_disk.MASTER}:
                        check_name(unit.away, name.removeprefix(on_disk.STATE))
        self._plans = {name: self._reader.plan(name, runs) for name, runs in self._wanted.items()}
        self._refused: CheckpointMismatch | None = None
        with closing(self._reader.rounds(list(self._plans.values()))) as rounds:
            for plan, windows, slabs in rounds:
                if (
                    half is not None
                    and plan is self._plans[on_disk.MASTER]
                    and self._refused is None
                ):
                    with topology.agreed("hold the values against the precision of the model"):
                        self._look_at(slabs, windows[topology.rank], half)

    def _look_at(self, slabs: Tensor, window: range, half: torch.dtype) -> None:
        table = self._reader.manifest.table
        for row in table.owners:
            start, stop = max(row.offset, window.start), min(row.offset + row.numel, window.stop)
            if start < stop:
                part = slabs[start - window.start : stop - window.start]
                try:
                    check_range(part, half, table, start, self._reader.path)
                except CheckpointMismatch as error:
                    self._refused = error
                    return

    @override
    def check(self) -> None:
        with self._topology.agreed("hold the values against the precision of the model"):
            if self._refused is not None:
                raise self._refused

    @override
    def give_values(self) -> None:
        self._inventory.end_step()
        self._bring(on_disk.MASTER, VALUES)
        for unit in self._inventory.units:
            unit.publish()

    @override
    def give_state(self, key: str, present: Mapping[str, Scalar | None]) -> None:
        self._bring(on_disk.STATE + key, key)
        self._inventory.note_away(key, present)

    def _bring(self, name: str, part: str) -> None:
        """From dataset ``name`` to ``part`` on the tier, or to wherever it rests."""
        topology, plan = self._topology, self._plans[name]
        shards = [unit.away for unit in self._inventory.units if unit.away is not None]
        # Whatever went wrong with what was there does not matter any more.
        with topology.agreed(f"make room for {name}"):
            for shard in shards:
                if part in shard.parts:
                    shard.drop([part])
            held = self._inventory.sink(None if name == on_disk.MASTER else part, plan.order)
        with closing(self._reader.rounds([plan])) as rounds:
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
