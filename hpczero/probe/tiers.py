"""How fast this job's ranks together write to and read from a memory tier, by the tier's own calls."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.errors import HpcZeroError

# Torch comes with it, and the doctor does without unless it is asked about a disk.
if TYPE_CHECKING:
    from hpczero.accelerator import Accelerator
    from hpczero.job.group import Group
    from hpczero.tier import Fetch, Tier

SECONDS = 1.0  # of writing, and of reading
RECORD_NBYTES, RECORDS, BLOCKS = 16 * 2**20, 16, 4


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


def measure_disk(group: Group, folder: Path) -> list[Speed]:
    """A disk tier in ``folder``. Collective over ``group``; all files are gone afterwards."""

    def make(tell: Callable[[str], None]) -> Tier:
        # and torch, which the rest of the doctor can do without
        from hpczero.tier import DiskTier

        return DiskTier(folder, blocks=BLOCKS, block_nbytes=RECORD_NBYTES, tell=tell)

    return measure_tier(group, make)


def measure_host(group: Group, accelerator: Accelerator) -> list[Speed]:
    """A tier in memory of the host beside the device of each rank. Collective over ``group``."""

    def make(tell: Callable[[str], None]) -> Tier:
        from hpczero.tier import HostTier

        return HostTier(blocks=BLOCKS, block_nbytes=RECORD_NBYTES, accelerator=accelerator)

    return measure_tier(group, make)


def measure_tier(group: Group, make: Callable[[Callable[[str], None]], Tier]) -> list[Speed]:
    """Of each rank, all at once, for some ``SECONDS``. Collective over ``group``.

    Args:
        group: the ranks that share the medium.
        make: a tier of ``BLOCKS`` blocks, from what it may call to tell something.
    """
    trial = _Trial(group, make)
    try:
        for part in (trial.begin, trial.write, trial.read):
            problem = ""
            try:
                part()
            except (HpcZeroError, OSError, MemoryError, ImportError) as error:
                problem = f"rank {group.rank}: {error}"
            found = group.gather_text(problem)  # nobody measures beside ranks that do not
            if any(found):
                return [Speed(error=error) for error in found]
    finally:
        trial.end()
    mine = json.dumps(dataclasses.asdict(trial.speed()))
    return [Speed(**json.loads(text)) for text in group.gather_text(mine)]


class _Trial:
    def __init__(self, group: Group, make: Callable[[Callable[[str], None]], Tier]) -> None:
        self._group = group
        self._make = make
        self._rates: list[float] = []
        self._told: list[str] = []
        self._how = ""
        self.end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Make the tier and write as many records as a second takes, of noise: some disks are quick with zeros."""
        from hpczero.tier import Record

        self._tier = self._make(self._told.append)
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
        self._group.barrier()
        turn, began = 0, time.perf_counter()
        while turn == 0 or time.perf_counter() - began < SECONDS:
            one(turn)
            turn += 1
        rest()
        self._tier.drain()
        self._rates.append(turn * RECORD_NBYTES / (time.perf_counter() - began))
