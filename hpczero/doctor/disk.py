"""How fast this job's ranks together write and read a disk, by the disk tier's own calls, and what a step would cost.

Owns: the trial, and what is said of it. Must not know: models, plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from hpczero.doctor.finding import Finding, Status
from hpczero.errors import HpcZeroError

if TYPE_CHECKING:  # torch comes with it, and with --disk alone
    from hpczero.tier import Fetch

SECONDS = 1.0  # of writing, and of reading
RECORD_NBYTES, RECORDS, BLOCKS = 16 * 2**20, 16, 4
# Bytes of a step per parameter, read and written. Everything: fp32 weights for forward and for backward, gradients out;
# then in come weight, gradient and two states, and all but the gradient go out. The second: weight and states alone.
EVERYTHING, OPTIMIZER = (4 + 4 + 16, 4 + 12), (12, 12)


@dataclass(frozen=True)
class Speed:
    """What one rank moved, while all others did the same.

    Attributes:
        read, write: bytes/s; 0 where there was an error.
        how: the tier in a line.
        caveat: what the tier has told, or empty.
        error: why it could not, or empty.
    """

    read: float = 0.0
    write: float = 0.0
    how: str = ""
    caveat: str = ""
    error: str = ""


def measure_disk(comm: MPI.Intracomm, folder: Path) -> list[Speed]:
    """Of each rank, all at once, for some ``SECONDS``. Collective over ``comm``; all files are gone afterwards."""
    trial = _Trial(comm, folder)
    try:
        for part in (trial.begin, trial.write, trial.read):
            problem = ""
            try:
                part()
            except (HpcZeroError, OSError, MemoryError, ImportError) as error:
                problem = f"rank {comm.rank}: {error}"
            found: list[str] = comm.allgather(problem)  # nobody measures beside ranks that do not
            if any(found):
                return [Speed(error=error) for error in found]
    finally:
        trial.end()
    return list(comm.allgather(trial.speed()))


class _Trial:
    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        self._comm = comm
        self._folder = folder
        self._rates: list[float] = []
        self._told: list[str] = []
        self._how = ""
        self.end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Make the tier and write as many records as a second takes, of noise: some disks are quick with zeros."""
        from hpczero.tier import (
            DiskTier,
            Record,
        )  # and torch, which the rest of the doctor can do without

        self._tier = DiskTier(
            self._folder, blocks=BLOCKS, block_nbytes=RECORD_NBYTES, tell=self._told.append
        )
        self.end = self._tier.close
        self._how = self._tier.describe()
        reserved = [
            self._tier.reserve(Record(str(i), {"a": RECORD_NBYTES})) for i in range(RECORDS)
        ]
        self._places = []
        stop = time.perf_counter() + SECONDS
        for place in reserved:
            staged = self._tier.fetch(place, (), fresh=["a"]).wait()
            staged["a"].random_()
            self._tier.evict(staged, ["a"])
            self._places.append(place)
            if time.perf_counter() > stop:
                break
        self._tier.drain()

    def write(self) -> None:
        """Over and over."""

        def one(turn: int) -> None:
            place = self._places[turn % len(self._places)]
            self._tier.evict(self._tier.fetch(place, (), fresh=["a"]).wait(), ["a"])

        self._timed(one)

    def read(self) -> None:
        """As many records ahead as there are blocks."""
        ahead: list[Fetch] = []

        def one(turn: int) -> None:
            ahead.append(self._tier.fetch(self._places[turn % len(self._places)], ["a"]))
            if len(ahead) == BLOCKS:
                self._tier.evict(ahead.pop(0).wait(), ())

        self._timed(one, lambda: [fetch.wait() for fetch in ahead])

    def speed(self) -> Speed:
        """After all of it."""
        write, read = self._rates
        return Speed(read, write, self._how, " ".join(self._told))

    def _timed(
        self, one: Callable[[int], object], rest: Callable[[], object] = lambda: None
    ) -> None:
        self._comm.Barrier()
        turn, began = 0, time.perf_counter()
        while turn == 0 or time.perf_counter() - began < SECONDS:
            one(turn)
            turn += 1
        rest()
        self._tier.drain()
        self._rates.append(turn * RECORD_NBYTES / (time.perf_counter() - began))


def check_disk(speeds: Sequence[Speed], folder: Path) -> Iterator[Finding]:
    """What the ranks have seen, and seconds of a step for each billion parameters."""
    title, errors = "disk tier", [speed.error for speed in speeds if speed.error]
    if errors:
        yield Finding(
            title,
            errors[0],
            Status.FAIL,
            "name a folder on a disk of the node that has room and may be written to: --disk FOLDER",
        )
        return
    read, write = (min(getattr(speed, way) for speed in speeds) for way in ("read", "write"))
    value = (
        f"{folder}: {sum(s.read for s in speeds) / 1e9:.2f} GB/s read, {sum(s.write for s in speeds) / 1e9:.2f} GB/s "
        f"written by {len(speeds)} rank(s) at once (slowest rank: {read / 1e9:.2f}, {write / 1e9:.2f}); {speeds[0].how}"
    )
    caveat = next((speed.caveat for speed in speeds if speed.caveat), "")
    if caveat:
        yield Finding(
            title, value, Status.WARN, f"{caveat}; a local disk with ext4 or xfs has them"
        )
    else:
        yield Finding(title, value)
    everything, optimizer = (
        1e9 / len(speeds) * (into / read + out / write) for into, out in (EVERYTHING, OPTIMIZER)
    )
    yield Finding(
        "step from disk",
        f"for each billion fp32 parameters over these {len(speeds)} rank(s), with Adam and one micro-batch: "
        f"{everything:.1f} s of disk with everything there ({sum(EVERYTHING)} bytes per parameter), {optimizer:.1f} s "
        f"with the optimizer's part alone ({sum(OPTIMIZER)}), less what computing hides",
    )
