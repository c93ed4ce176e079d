"""What `scaling.tiers` measures: training from a disk and in memory, the same bytes without arithmetic, and fio.

Collective over the topology unless said: all ranks read and write at a time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partialmethod
from pathlib import Path

from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.errors import ConfigError, HpcZeroError
from hpczero.job.topology import Topology
from hpczero.tier import DiskTier, Fetch, Place, Record, Tier
from scaling.contenders import base
from scaling.contenders.hpczero_stage import Contender
from scaling.contenders.workload import Workload

RECORD_NBYTES, RECORDS, BLOCKS = 16 * 2**20, 16, 4
CALL_NBYTES, IN_FLIGHT = 4 * 2**20, 4  # as hpczero.tier.staged has them


class Pair:
    """One model twice, with all that it keeps on the tier and in memory.

    Attributes:
        sequences, context: of the batch of one rank.
        tier: of the first.
    """

    sequences: int = 1
    context: int = 1

    def __init__(self, topology: Topology, workload: Workload, offload: Offload) -> None:
        self._workload, self._topology = workload, topology
        self._twins = {"disk": self._built(offload), "memory": self._built(None)}
        store = hpczero.sharding(self._away).away.store
        assert store is not None, "offload was asked for"
        self.tier, self._ahead = store.tier, max(store.blocks - 2, 1)
        self._losses: dict[str, list[float]] = {name: [] for name in self._twins}

    def _built(self, offload: Offload | None) -> Contender:
        twin = Contender(3, "auto", offload=offload)
        twin.join(self._topology)
        twin.build(self._workload)
        return twin

    @property
    def _away(self) -> nn.Module:
        return self._twins["disk"].model

    @property
    def _sized(self) -> Workload:
        return dataclasses.replace(self._workload, sequences=self.sequences, context=self.context)

    def describe(self) -> str:
        """One line for headings; not collective."""
        return self._sized.describe()

    def warm_up(self) -> None:
        """A pass and a step of both."""
        for which in self._twins:
            self.take_pass(which)
            self.take_step(which)

    def take_pass(self, which: str) -> None:
        """Forward and backward of the twin on ``disk`` or in ``memory``."""
        losses = self._losses[which]
        tokens, targets = base.batch(self._sized, step=len(losses), rank=self._topology.rank)
        loss: Tensor = self._twins[which].model(tokens, targets)
        loss.backward()
        losses.append(float(loss.item()))

    def take_step(self, which: str) -> None:
        """The update. Raises HpcZeroError: losses so far are not those of the other twin, bit for bit."""
        optimizer = self._twins[which].optimizer
        optimizer.step()
        optimizer.zero_grad()
        pairs = list(zip(*self._losses.values(), strict=False))
        if any(disk != memory for disk, memory in pairs):
            raise HpcZeroError(
                f"losses from disk and in memory differ: {pairs}, expected the same bits"
            )

    def disk_of_a_pass(self) -> None:
        """The bytes of a pass: values twice, gradients out; what is written is what was there. Not collective."""
        places = self._places()
        through(self.tier, places, ["values"], [], self._ahead)
        through(self.tier, reversed(places), ["values"], [], self._ahead)
        self.lay_gradients()

    def lay_gradients(self) -> None:
        """Something to be read as gradients, where a step has dropped them. Not collective."""
        for place in self._places():
            staged = self.tier.fetch(place, [], fresh=["gradient"]).wait()
            self.tier.evict(staged, ["gradient"])
        self.tier.drain()

    def disk_of_a_step(self) -> None:
        """The bytes of a step: everything in, all but the gradients out; they are laid. Not collective."""
        places = self._places()
        parts = list(places[0].record.parts)
        written = [part for part in parts if part != "gradient"]
        through(self.tier, places, parts, written, self._ahead)
        self.tier.drain()

    def _places(self) -> list[Place]:
        units = hpczero.sharding(self._away).units
        return [place for unit in units if unit.away is not None for place in unit.away.places]

    def close(self) -> None:
        """Give everything back."""
        for twin in self._twins.values():
            hpczero.release(twin.model)


def through(
    tier: Tier, places: Iterable[Place], read: Sequence[str], written: Sequence[str], most: int
) -> None:
    """Read these parts of all places, as far as they are there, ``most`` ahead; and write parts back."""
    on_their_way: deque[Fetch] = deque()
    for place in places:
        on_their_way.append(tier.fetch(place, [part for part in read if part in place.known]))
        if len(on_their_way) > most:
            tier.evict(on_their_way.popleft().wait(), written)
    while on_their_way:
        tier.evict(on_their_way.popleft().wait(), written)


class Engine:
    """Records of noise on a disk tier.

    Attributes:
        rate: bytes/s of all ranks together in the last call.
    """

    rate = 0.0

    def __init__(self, topology: Topology, folder: Path) -> None:
        self._topology = topology
        self._tier = DiskTier(folder, blocks=BLOCKS, block_nbytes=RECORD_NBYTES)
        names = [Record(str(number), {"a": RECORD_NBYTES}) for number in range(RECORDS)]
        self._places = [self._tier.reserve(record) for record in names]
        for place in self._places:
            staged = self._tier.fetch(place, [], fresh=["a"]).wait()
            staged["a"].random_()  # some disks are quick with zeros
            self._tier.evict(staged, ["a"])
        self._tier.drain()

    def read(self) -> None:
        """Every record, with as many ahead as there are blocks."""
        self._topology.barrier()
        began = time.perf_counter()
        through(self._tier, self._places, ["a"], [], BLOCKS - 1)
        self._note(began)

    def write(self) -> None:
        """Every record."""
        self._topology.barrier()
        began = time.perf_counter()
        for place in self._places:
            self._tier.evict(self._tier.fetch(place, [], fresh=["a"]).wait(), ["a"])
        self._tier.drain()
        self._note(began)

    def _note(self, began: float) -> None:
        mine = RECORDS * RECORD_NBYTES / (time.perf_counter() - began)
        self.rate = sum(self._topology.gather(mine))

    def close(self) -> None:
        """Its file is gone; not collective."""
        self._tier.close()


class Fio:
    """fio past the kernel's cache, with as many jobs as there are ranks; rank 0 runs it.

    Attributes:
        rate: bytes/s of all jobs together in the last call.
    """

    rate = 0.0

    def __init__(self, topology: Topology, folder: Path, nbytes: int) -> None:
        """``nbytes``: of each job. Raises ConfigError: there is no fio."""
        self._topology, self._folder, self._nbytes = topology, folder, nbytes
        with topology.agreed("find fio"):
            if topology.is_root and shutil.which("fio") is None:
                raise ConfigError(
                    "fio is not installed, which the disk is compared with; type: apt-get install fio, or take "
                    "--fio_mib 0"
                )

    def _run(self, way: str) -> None:
        """Of files that are there already."""
        rate = 0.0
        with self._topology.agreed(f"run fio, which is to {way}"):
            if self._topology.is_root:
                rate = self._rate(way)
        self.rate = self._topology.gather(rate)[0]

    read, write = partialmethod(_run, "read"), partialmethod(_run, "write")

    def _rate(self, way: str) -> float:
        options = (
            f"--name=hpczero-tiers --rw={way} --bs={CALL_NBYTES} --iodepth={IN_FLIGHT} "
            f"--ioengine=io_uring --direct=1 --size={self._nbytes} "
            f"--numjobs={self._topology.size} --group_reporting --output-format=json"
        )
        command = ["fio", f"--directory={self._folder}", *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        for file in self._folder.glob("hpczero-tiers.*"):
            if way == "read":
                file.unlink()
        if done.returncode:
            raise HpcZeroError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        found = json.loads(done.stdout[done.stdout.index("{") :])
        return float(found["jobs"][0][way]["bw_bytes"])
