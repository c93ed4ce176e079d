"""The batch of the measurement of memory tiers is found by trial; both of its models must see every batch of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero import Offload, Topology
from scaling.contenders.workload import WORKLOADS
from scaling.tiers.__main__ import calibrated
from scaling.tiers.cases import Pair

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


def test_losses_stay_comparable_when_a_slow_disk_asks_for_a_larger_batch(
    topology: Topology, folder: Path
) -> None:
    everything = Offload("disk", "disk", "disk", folder, 2**20, 3, 1)
    pair = Pair(topology, WORKLOADS["tiny"], everything)
    pair.context = 16
    took = iter((1.0, 1.5, 2.0))  # one sequence, the disk, three of them

    def clock(_: Topology, call: Callable[[], object]) -> float:
        call()
        return next(took)

    pair.sequences = calibrated(topology, pair, clock)
    assert pair.sequences == 5  # half a second for each, and half a second for the pass itself
    pair.warm_up()  # a step compares all losses so far
    pair.close()
