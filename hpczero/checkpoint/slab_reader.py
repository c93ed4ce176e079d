"""Datasets of one checkpoint, read by all ranks together and checked on the way.

Owns: which rank reads which slab, and when. Must not know: models, who needs what of a slab (``exchange``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpczero.checkpoint.disk.format import STATE_FILE, Dataset, Manifest, digest
from hpczero.checkpoint.disk.rawfile import read_into
from hpczero.checkpoint.exchange import EvenRuns, Exchange
from hpczero.errors import CorruptCheckpoint
from hpczero.files.regular import open_regular, reason
from hpczero.job.topology import Topology
from hpczero.job.watchdog import Watchdog

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
    exchange: Exchange

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
        exchange = Exchange(topology.world.comm, topology.watchdog, runs.take(order))
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
