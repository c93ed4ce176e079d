"""The disk without a model: hpczero's own engine, and fio, with the same calls.

Owns: both. Must not know: the order of a run, models. Collective unless said: all ranks read and write at a time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

from hpczero.errors import ConfigError, HpcZeroError
from hpczero.job.topology import Topology
from hpczero.tier import DiskTier, Fetch, Record

RECORD_NBYTES, RECORDS, BLOCKS = 16 * 2**20, 16, 4
CALL_NBYTES, IN_FLIGHT = 4 * 2**20, 4  # as hpczero.tier.staged has them


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
        ahead: list[Fetch] = []
        for place in self._places:
            ahead.append(self._tier.fetch(place, ["a"]))
            if len(ahead) == BLOCKS:
                self._tier.evict(ahead.pop(0).wait(), [])
        for fetch in ahead:
            self._tier.evict(fetch.wait(), [])
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
        """``nbytes``: of each job.

        Raises:
            ConfigError: there is no fio.
        """
        self._topology, self._folder, self._nbytes = topology, folder, nbytes
        with topology.agreed("find fio"):
            if topology.is_root and shutil.which("fio") is None:
                raise ConfigError(
                    "fio is not installed, which the disk is held against; type: apt-get install fio, or take "
                    "--fio_mib 0"
                )

    def read(self) -> None:
        """Of files that are there already."""
        self._run("read")

    def write(self) -> None:
        """Of files that are there already."""
        self._run("write")

    def _run(self, way: str) -> None:
        rate = 0.0
        with self._topology.agreed(f"run fio, which is to {way}"):
            if self._topology.is_root:
                rate = self._rate(way)
        self.rate = self._topology.gather(rate)[0]

    def _rate(self, way: str) -> float:
        command = [
            "fio",
            "--name=hpczero-tiers",
            f"--directory={self._folder}",
            f"--rw={way}",
            f"--bs={CALL_NBYTES}",
            f"--iodepth={IN_FLIGHT}",
            "--ioengine=io_uring",
            "--direct=1",
            f"--size={self._nbytes}",
            f"--numjobs={self._topology.size}",
            "--group_reporting",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        for file in self._folder.glob("hpczero-tiers.*"):
            if way == "read":
                file.unlink()
        if done.returncode:
            raise HpcZeroError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        found = json.loads(done.stdout[done.stdout.index("{") :])
        return float(found["jobs"][0][way]["bw_bytes"])
